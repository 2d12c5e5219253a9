"""Popular recipes going wrong, each in its smallest form, beside ours going right. docs/what_the_guides_get_wrong.md
tells them in plain words. `-k t21` picks one.

Each runs in a Python of its own, since torch_xla and Accelerate read the environment once. Where a trap needs several
ranks, they are virtual TPU devices; where it needs one XLA device, XLA's CPU backend.
"""
import sys

import pytest
import torch
from conftest import run_script

import checkpoint as ckpt
import runtime as rt

XLA_CPU = 'import runtime as rt\nplatform = rt.patch_environment("xla-cpu")\n'
TWO_RANKS = 'import runtime as rt\nplatform = rt.patch_environment("virtual-tpu")\n'


def facts(tmp_path, code: str, prelude: str = "", **environment) -> dict:
    """Run code; its lines `name = value`, printed by the function `tell`, as {name: value as text}."""
    # in one write, between line ends: the ranks' words, and those of the libraries, go to the same place
    tell = 'import os\ndef tell(name, value):\n    os.write(1, f"\\nFACT {name} = {value}\\n".encode())\n'
    output = run_script(prelude + tell + code, tmp_path, VIRTUAL_TPU_DEVICES="2", VIRTUAL_TPU_PATIENCE="20",
                        **environment).stdout
    return dict(line[5:].split(" = ", 1) for line in output.splitlines() if line.startswith("FACT "))


def test_t1_accelerates_bf16_stores_the_master_weights_in_bf16(tmp_path):
    """Accelerate takes this branch where torch_xla says that the device is a TPU: here it is made to say so."""
    code = """
import torch, torch_xla
if "{recipe}" == "guide":
    torch_xla.runtime.device_type = lambda: "TPU"
    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="bf16")
    device, autocast = accelerator.device, accelerator.autocast
else:
    runtime = rt.Runtime("bf16")
    device, autocast = runtime.device, runtime.autocast
weight = torch.ones((1, 1)).to(device)
for step in range(1000):
    weight = weight + 0.001
    if step % 100 == 99:
        torch_xla.sync()
tell("weight", round(weight.item(), 2))
tell("dtype", weight.dtype)
with autocast():
    tell("product", torch.nn.functional.linear(weight, weight).dtype)
"""
    guide = facts(tmp_path, code.replace("{recipe}", "guide"), XLA_CPU)
    ours = facts(tmp_path, code.replace("{recipe}", "ours"), XLA_CPU)
    assert guide == {"weight": "1.0", "dtype": "torch.float32", "product": "torch.float32"}
    assert ours == {"weight": "2.0", "dtype": "torch.float32", "product": "torch.bfloat16"}


def test_t1_a_worker_refuses_the_variable(monkeypatch):
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.raises(rt.UserError, match="XLA_USE_BF16 would store master weights"):
        rt.Runtime("fp32")


def test_t2_one_accumulate_context_around_the_loop_skips_every_second_step(tmp_path):
    """The gradient of a micro-step is 1, the learning rate 1: after each batch of two the weight must be one lower."""
    code = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
weight = torch.nn.Parameter(torch.zeros(1))
model = torch.nn.Module()
model.register_parameter("weight", weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD([weight], lr=1.0))
weights = []
for batch in range(4):
    with accelerator.accumulate(model):
        for micro_step in range(2):
            accelerator.backward(weight.sum())
        optimizer.step()
        optimizer.zero_grad()
    weights.append(weight.item())
tell("guide", weights)
import runtime as rt
runtime = rt.Runtime("fp32")
weight = torch.nn.Parameter(torch.zeros(1))
optimizer, weights = torch.optim.SGD([weight], lr=1.0), []
for batch in range(4):
    for micro_step in range(2):
        (weight.sum() / 2).backward()
    runtime.optimizer_step(optimizer, max_norm=1e9)
    weights.append(weight.item())
tell("ours", weights)
"""
    # accelerator.backward halves the gradient, so two micro-steps make 1, and a step that was left out makes 2.
    told = facts(tmp_path, code, 'import runtime as rt\nplatform = rt.patch_environment("cpu")\n')
    assert told["ours"] == "[-1.0, -2.0, -3.0, -4.0]"
    assert told["guide"] == "[0.0, -2.0, -2.0, -4.0]"


def test_t3_accumulation_does_not_save_reductions_on_xla(tmp_path):
    code = """
import torch, torch_xla.debug.metrics as metrics

def reductions():
    # AllReduce and AllReduceInPlace with a scale, all_reduce without
    names = [name for name in metrics.counter_names() if "allreduce" in name.lower().replace("_", "")]
    return sum(metrics.counter_value(name) for name in names)

def worker():
    runtime = rt.Runtime("fp32")
    from accelerate import Accelerator
    accelerator = Accelerator(gradient_accumulation_steps=4)
    for recipe in ("guide", "ours"):
        model = torch.nn.Linear(4, 4).to(runtime.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, prepared = accelerator.prepare(model, optimizer)
        before = reductions()
        for micro_step in range(4):
            if recipe == "guide":
                with accelerator.accumulate(model):
                    accelerator.backward(model(torch.ones(2, 4).to(runtime.device)).sum())
                    prepared.step()
            else:
                (model(torch.ones(2, 4).to(runtime.device)).sum() / 4).backward()
        if recipe == "ours":
            runtime.optimizer_step(optimizer, max_norm=1.0)
        if runtime.is_main:
            tell(recipe, reductions() - before)
        runtime.sync()

rt.launch(worker, (), platform)
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert told == {"guide": "4", "ours": "1"}, "the guide reduces on every micro-step"


def test_t4_a_gather_under_if_rank_0_never_returns(tmp_path):
    code = """
import torch

def worker(recipe):
    runtime = rt.Runtime("fp32")
    loss = torch.tensor([runtime.rank + 2.0]).to(runtime.device)
    if recipe == "guide":
        if runtime.accelerator.process_index == 0:
            print("mean loss", runtime.accelerator.gather(loss).mean().item())
    else:
        mean = runtime.host_values(runtime.all_reduce(loss))
        if runtime.is_main:
            tell("ours", mean)
    runtime.barrier()

rt.launch(worker, ("ours",), platform)
try:
    rt.launch(worker, ("guide",), platform)
except rt.UserError as error:
    tell("guide", str(error).replace(chr(10), " "))
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert told["ours"] == "[2.5]"
    assert "The ranks left the common path at sync 1:   rank 0 came to sync 1 at script_under_test.py:" in told["guide"]


def test_t5_the_alias_does_not_bind_torch_xla(tmp_path):
    code = """
{import}
try:
    torch_xla.sync()
    tell("sync", "works")
except NameError as error:
    tell("sync", error)
"""
    guide = facts(tmp_path, code.replace("{import}", "import torch_xla.core.xla_model as xm"), XLA_CPU)
    ours = facts(tmp_path, code.replace("{import}", "import torch_xla"), XLA_CPU)
    assert guide["sync"] == "name 'torch_xla' is not defined" and ours["sync"] == "works"


def test_t7_the_launcher_ignores_processes_and_precision_on_a_tpu(tmp_path):
    code = """
from accelerate import Accelerator, notebook_launcher
import torch_xla.runtime as xr

def worker():
    if xr.global_ordinal() == 0:
        accelerator = Accelerator()
        tell("processes", accelerator.num_processes)
        tell("precision", accelerator.mixed_precision)

notebook_launcher(worker, num_processes=5, mixed_precision="bf16")
try:
    rt.launch(worker, (), platform, processes=5)
except rt.UserError as error:
    tell("ours", error)
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert (told["processes"], told["precision"]) == ("2", "no"), "five processes and bf16 were asked for"
    assert told["ours"].startswith("processes=5 cannot be had on virtual-tpu")


def test_t8_two_cpu_processes_train_alone_unless_a_variable_is_set(tmp_path):
    code = """
import os
import runtime as rt
if "{recipe}" == "guide":
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["USE_TORCH_XLA"] = "0"

def worker():
    from accelerate import Accelerator
    accelerator = Accelerator()
    tell(f"process {os.getpid()}", (accelerator.num_processes, accelerator.is_main_process))

if "{recipe}" == "guide":
    from accelerate import notebook_launcher
    notebook_launcher(worker, num_processes=2, use_port=str(rt._free_port()))
else:
    rt.launch(worker, (), rt.patch_environment("cpu"), processes=2)
"""
    guide = facts(tmp_path, code.replace("{recipe}", "guide"))
    ours = facts(tmp_path, code.replace("{recipe}", "ours"))
    assert sorted(guide.values()) == ["(1, True)", "(1, True)"], "two worlds of one, each the main process"
    assert sorted(ours.values()) == ["(2, False)", "(2, True)"]


def test_t10_reduce_and_gather_each_cut_the_program(tmp_path):
    code = """
import torch, torch_xla.debug.metrics as metrics

def syncs():
    return metrics.counter_value("MarkStep") or 0

def worker():
    runtime = rt.Runtime("fp32")
    loss = torch.tensor([runtime.rank + 2.0]).to(runtime.device)
    runtime.sync()
    for recipe, reduce in (("reduce", runtime.accelerator.reduce), ("gather", runtime.accelerator.gather),
                           ("ours", runtime.all_reduce)):
        before = syncs()
        reduce(loss)
        runtime.sync()      # every rank has done its part
        if runtime.is_main:
            tell(recipe, (syncs() - before) // 2 - 1)

rt.launch(worker, (), platform)
"""
    assert facts(tmp_path, code, TWO_RANKS) == {"reduce": "2", "gather": "1", "ours": "0"}


def test_t11_adams_first_step_is_a_program_of_its_own(tmp_path):
    code = """
import torch
import checkpoint as ckpt
runtime = rt.Runtime("fp32")
for recipe, width in (("guide", 4), ("ours", 3)):       # two widths: neither meets a program of the other
    model = torch.nn.Linear(4, width).to(runtime.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    if recipe == "ours":
        ckpt.load_optimizer(optimizer, model)
    runtime.sync()
    compiled = []
    for step in range(4):
        before = runtime.compile_count()
        model(torch.ones(2, 4).to(runtime.device)).square().mean().backward()
        runtime.optimizer_step(optimizer, max_norm=1.0)
        runtime.sync()
        compiled.append(runtime.compile_count() - before)
    tell(recipe, compiled)
"""
    assert facts(tmp_path, code, XLA_CPU) == {"guide": "[1, 1, 0, 0]", "ours": "[1, 0, 0, 0]"}


def test_t12_a_rewritten_cell_is_not_the_code_that_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    cell = tmp_path / "cell_of_t12.py"
    cell.write_text("answer = 1\n")
    import cell_of_t12
    cell.write_text("answer = 2\n")
    import cell_of_t12      # noqa: F811, what running the cell again does
    assert cell_of_t12.answer == 1
    assert rt.load_fresh("cell_of_t12", tmp_path).answer == 2
    del sys.modules["cell_of_t12"]


def test_t13_torchs_own_checkpointing_does_not_work_on_xla(tmp_path):
    """torch_xla's puts what it recomputes behind a barrier, so XLA cannot merge it with the first computation."""
    code = """
import torch, torch_xla, torch.utils.checkpoint as torchs, torch_xla.utils.checkpoint as xlas
runtime = rt.Runtime("fp32")
block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).to(runtime.device)
runtime.sync()

def attempt(recipe, run):
    x = torch.ones(4, 8).to(runtime.device).requires_grad_()
    try:
        run(x).square().sum().backward()
        program = runtime.pending_program(x.grad)
        tell(recipe, (program.count(" dot("), "opt-barrier" in program))
    except Exception as error:
        tell(recipe, f"{type(error).__name__}: {error}")
    runtime.sync()

attempt("none", block)
attempt("guide", lambda x: torchs.checkpoint(block, x, use_reentrant=False))
attempt("mixed", lambda x: xlas.checkpoint(block, x, use_reentrant=False))
attempt("ours", lambda x: runtime.checkpoint_function()(block, x))
"""
    told = facts(tmp_path, code, XLA_CPU)
    assert told["guide"] == "AttributeError: module 'torch' has no attribute 'xla'"
    assert told["mixed"] == "ValueError: XLA currently does not support use_reentrant==False"
    assert (told["none"], told["ours"]) == ("(4, False)", "(5, True)"), "one product more: it is recomputed"


def test_t16_strict_false_trains_from_random_weights():
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    saved = {"module.weight": torch.zeros(2, 2), "module.bias": torch.zeros(2)}     # saved from a wrapped model
    model.load_state_dict(saved, strict=False)                                      # says nothing
    assert torch.equal(model.weight, before)
    with pytest.raises(rt.UserError, match="weight"):
        ckpt.load_model(model, saved)


def test_t17_restoring_the_generator_does_not_restore_the_order(shards):
    from accelerate import skip_first_batches
    from torch.utils.data import DataLoader

    import token_data

    torch.manual_seed(0)
    seen = []
    for number, batch in enumerate(DataLoader(range(32), shuffle=True)):
        if number == 4:
            saved = torch.get_rng_state()       # a checkpoint in the middle of the epoch
        seen.append(batch.item())
    torch.set_rng_state(saved)
    resumed = [batch.item() for batch in skip_first_batches(DataLoader(range(32), shuffle=True), 4)]
    assert resumed != seen[4:]

    train = token_data.open_shards(shards, T=32).train
    whole = [token_data.train_batch(train, 7, step, 4, range(4))[0].tolist() for step in range(8)]
    assert [token_data.train_batch(train, 7, step, 4, range(4))[0].tolist() for step in range(4, 8)] == whole[4:]


def test_t18_save_state_with_a_prepared_loader_fails_on_xla(tmp_path):
    code = """
import torch
import checkpoint as ckpt
runtime = rt.Runtime("fp32")
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 4)), batch_size=2)
model, loader = runtime.accelerator.prepare(torch.nn.Linear(4, 4), data)
try:
    runtime.accelerator.save_state("state")
    tell("guide", "saved")
except AttributeError as error:
    tell("guide", error)
adam = torch.optim.AdamW(model.parameters(), capturable=True)
ckpt.load_optimizer(adam, model)
path = ckpt.save(".", "ours", 3, ckpt.model_tensors(model), ckpt.optimizer_tensors(adam, model), {})
tell("ours", ckpt.open_checkpoint(path).step)
"""
    told = facts(tmp_path, code, XLA_CPU)
    assert "has no attribute 'dataset'" in told["guide"] and told["ours"] == "3"


def test_t21_accumulating_and_clipping_lets_the_replicas_drift_apart(tmp_path):
    """Accelerate's documented pattern. Each rank has its own data; after the step all must hold the same weights."""
    code = """
import torch

def worker():
    runtime = rt.Runtime("fp32")
    for recipe in ("guide", "ours"):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 4).to(runtime.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared_model, prepared = runtime.accelerator.prepare(model, optimizer)
        torch.manual_seed(100 + runtime.rank)
        for step in range(3):
            for micro_step in range(2):
                (prepared_model(torch.rand(2, 4).to(runtime.device)).square().sum() / 2).backward()
            if recipe == "guide":
                runtime.accelerator.clip_grad_norm_(prepared_model.parameters(), 0.5)
                prepared.step()
                prepared.zero_grad()
            else:
                runtime.optimizer_step(optimizer, 0.5)
            runtime.sync()
        try:
            runtime.check_replicas(dict(model.named_parameters()), "after 3 steps")
            told = "all equal"
        except RuntimeError as error:
            told = str(error)
        if runtime.is_main:
            tell(recipe, told)

rt.launch(worker, (), platform)
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert told["ours"] == "all equal"
    assert told["guide"].startswith("after 3 steps: the replicas hold different weights in"), told["guide"]


@pytest.mark.parametrize("recipe, ends", [("guide", "hangs"), ("ours", "ends")])
def test_t22_work_before_the_fork_leaves_the_children_hanging(tmp_path, recipe, ends):
    code = f"""
import os
if "{recipe}" == "ours":
    import runtime as rt
    rt.patch_environment("cpu")
else:
    os.environ["OMP_NUM_THREADS"] = "4"
import multiprocessing, torch

def parallel_work():
    torch.rand(3000, 1000).exp().sum()

parallel_work()                     # a cell before the launch
child = multiprocessing.get_context("fork").Process(target=parallel_work)
child.start()
child.join(8)
tell("child", "hangs" if child.is_alive() else "ends")
child.kill()
"""
    assert facts(tmp_path, code) == {"child": ends}


def test_t22_a_backward_before_the_fork_breaks_the_childrens_backward(tmp_path):
    code = """
import torch

def backward():
    runtime = rt.Runtime("fp32")
    torch.ones(3).to(runtime.device).requires_grad_().sum().backward()
    runtime.sync()

rt.launch(backward, (), platform)
tell("ours", "works")
torch.ones(3, requires_grad=True).sum().backward()      # a cell before the launch, on the CPU
try:
    rt.launch(backward, (), platform)
except rt.WorkerFailed as error:
    tell("guide", [line for line in str(error).splitlines() if line.startswith("RuntimeError")])
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert told["ours"] == "works"
    assert "device_ready_queues_" in told["guide"] and "INTERNAL ASSERT FAILED" in told["guide"]


def test_t23_a_gather_is_another_program_on_every_rank(tmp_path):
    code = """
import hashlib, re, torch
import torch_xla.core.xla_model as xm

def worker():
    runtime = rt.Runtime("fp32")
    loss = torch.tensor([runtime.rank + 2.0]).to(runtime.device)
    gather = getattr(xm.all_gather, "original", xm.all_gather)      # the rehearsal replaces it, for this very reason
    for recipe, reduce in (("ours", runtime.all_reduce), ("guide", gather)):
        program = re.sub(r"[.][0-9]+", "", runtime.pending_program(reduce(loss)))     # without the numbers of its lines
        tell(f"{recipe} {runtime.rank}", hashlib.sha256(program.encode()).hexdigest())
        runtime.sync()

rt.launch(worker, (), platform)
"""
    told = facts(tmp_path, code, TWO_RANKS)
    assert told["guide 0"] != told["guide 1"] and told["ours 0"] == told["ours 1"]
