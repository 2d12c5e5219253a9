"""The environment patch replayed with real machines' variables, the branches of the launch, and what a failure says."""
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import clean_environment, run_script

import runtime as rt

# As recorded on the machines themselves; see the sources in the README's section on limits.
KAGGLE_TPU = {"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
              "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0",
              "TPU_WORKER_HOSTNAMES": "localhost", "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434,8435,8436,8437,8438",
              "TPU_SKIP_MDS_QUERY": "1", "KAGGLE_KERNEL_RUN_TYPE": "Interactive", "PYTHONUSERBASE": "/root/.local"}
COLAB_TPU = {"COLAB_TPU_1VM": "1", "COLAB_RELEASE_TAG": "release-colab_20260819", "TPU_ACCELERATOR_TYPE": "v5e-1",
             "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0",
             "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}
KAGGLE_T4 = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "KAGGLE_CONTAINER_NAME": "x"}
TOPOLOGY = {name: value for name, value in {**KAGGLE_TPU, **COLAB_TPU}.items()
            if name.startswith("TPU_") and name != "TPU_PROCESS_ADDRESSES"}


def patched(environ, chips=0, gpus=0, wanted="auto"):
    """The environment after the patch, and the platform, for a machine with these devices."""
    found = rt.detect_platform(wanted, environ, tpu_chips=chips, gpus=gpus)
    after = dict(environ)
    for name, value in rt.environment_changes(found, after).items():
        after.pop(name, None)
        if value is not None:
            after[name] = value
    assert rt.environment_changes(found, after) == {}, "the patch is not idempotent"
    return found, after


def test_kaggle_tpu_keeps_its_topology_and_loses_the_stale_address():
    found, after = patched({**KAGGLE_TPU, "CLOUD_TPU_TASK_ID": "0", "XLA_USE_BF16": "1", "TPU_PROCESS_BOUNDS": "1,1,1"}, chips=8)
    assert (found.name, found.processes, found.in_process) == ("tpu", 8, False)
    removed = {"TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID", "XLA_USE_BF16", "TPU_PROCESS_BOUNDS"}
    assert not removed & set(after)
    assert {name: after[name] for name in KAGGLE_TPU if name not in removed} == \
        {name: value for name, value in KAGGLE_TPU.items() if name not in removed}
    assert after["PJRT_DEVICE"] == "TPU" and after["OMP_NUM_THREADS"] == "1" and after["USE_TORCH_XLA"] == "1"
    assert "ACCELERATE_USE_CPU" not in after


def test_colab_single_chip_is_driven_in_process():
    found, after = patched(COLAB_TPU, chips=1)
    assert (found.name, found.processes, found.in_process) == ("tpu", 1, True)
    assert {name: after[name] for name in COLAB_TPU} == COLAB_TPU


@pytest.mark.parametrize("environ, gpus, name, processes", [
    (KAGGLE_T4, 2, "gpu", 2), ({}, 1, "gpu", 1), ({}, 0, "cpu", 1), ({"COLAB_RELEASE_TAG": "x"}, 0, "cpu", 1),
    ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, 0, "cpu", 1)])
def test_machines_without_a_tpu(environ, gpus, name, processes):
    found, after = patched(environ, gpus=gpus)
    assert (found.name, found.processes) == (name, processes)
    assert after["USE_TORCH_XLA"] == "0" and "PJRT_DEVICE" not in after
    assert (after.get("ACCELERATE_USE_CPU") == "1") == (name == "cpu")


@pytest.mark.parametrize("environ", [KAGGLE_TPU, COLAB_TPU])
def test_a_tpu_image_without_a_tpu_is_refused(environ):
    with pytest.raises(rt.UserError, match="no TPU chip is attached"):
        rt.detect_platform("auto", environ, tpu_chips=0, gpus=0)


def test_chips_are_counted_on_the_pci_bus(tmp_path):
    for number, (vendor, device) in enumerate([("0x1ae0", "0x0063")] * 8 + [("0x1ae0", "0xffff"), ("0x8086", "0x0063")]):
        folder = tmp_path / f"sys/bus/pci/devices/0000:00:{number:02}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    assert rt.count_tpu_chips(str(tmp_path)) == 8


TOPOLOGY_OF_ALL_RANKS = """
    import json, os, runtime
    environ = dict(os.environ)
    platform = runtime.detect_platform("auto", environ, tpu_chips=8, gpus=0)
    if {patch}:
        for name, value in runtime.environment_changes(platform, environ).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    from torch_xla._internal import tpu
    before = dict(os.environ)
    for rank in range(8):
        os.environ.clear(); os.environ.update(before)
        tpu.configure_topology(rank, 8)
        print("RANK", json.dumps([os.environ["TPU_PROCESS_ADDRESSES"].split(","), os.environ["CLOUD_TPU_TASK_ID"],
                                  os.environ["TPU_PROCESS_BOUNDS"], os.environ["TPU_VISIBLE_CHIPS"]]))
"""


@pytest.mark.parametrize("patch, addresses", [(True, 8), (False, 1)])
def test_torch_xla_itself_finds_eight_addresses_after_the_patch_and_one_without(tmp_path, patch, addresses):
    import json
    done = run_script(TOPOLOGY_OF_ALL_RANKS.format(patch=patch), tmp_path, **KAGGLE_TPU)
    ranks = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("RANK ")]
    assert [len(set(addresses)) for addresses, *_ in ranks] == [addresses] * 8
    if patch:
        assert [rank[1:] for rank in ranks] == [[str(r), "2,4,1", str(r)] for r in range(8)]


LAUNCH_BRANCH = """
    import os, runtime, multiprocessing
    import torch_xla.distributed.xla_multiprocessing as xmp
    xmp.spawn = lambda *args, **kwargs: print("SPAWNED", kwargs)
    runtime.count_tpu_chips = lambda root="/": {chips}
    platform = runtime.patch_environment("auto")
    runtime.launch(lambda: print("RAN", os.getpid() == {pid}), (), platform)
"""


@pytest.mark.parametrize("machine, chips, spawned", [(KAGGLE_TPU, 8, True), (COLAB_TPU, 1, False)])
def test_the_launcher_takes_its_tpu_branch_on_kaggle_and_colab_runs_in_process(tmp_path, machine, chips, spawned):
    """The spawn itself needs chips, so it alone is replaced by a print; everything before it is the real thing."""
    code = LAUNCH_BRANCH.format(chips=chips, pid="os.getpid()")
    done = run_script(code, tmp_path, **machine)
    assert ("SPAWNED {'args': (), 'start_method': 'fork'}" in done.stdout) == spawned, done.stdout
    assert ("RAN True" in done.stdout) == (not spawned)


def test_patching_twice_changes_nothing_and_says_so(tmp_path):
    done = run_script("import runtime; runtime.patch_environment('cpu'); print('AGAIN'); runtime.patch_environment('cpu')",
                      tmp_path)
    assert "nothing changed" in done.stdout.split("AGAIN")[1] and "nothing changed" not in done.stdout.split("AGAIN")[0]


@pytest.mark.parametrize("script", ["train_mlp", "train_gpt", "resume_gpt"])
def test_a_script_sets_the_thread_variables_before_torch_reads_them(tmp_path, script):
    from conftest import ROOT
    done = run_script(f"""
        import runpy, sys, runtime
        runtime.launch = lambda *args, **kwargs: None
        sys.argv = ["{script}.py"] + (["--preset", "tiny"] if "{script}" == "train_gpt" else [])
        try:
            runpy.run_path({str(ROOT / "py" / script)!r} + ".py", run_name="__main__")
        except SystemExit:
            pass
        import torch
        print("THREADS", torch.get_num_threads())
        """, tmp_path)
    assert done.stdout.splitlines()[-1] == "THREADS 1"


def test_importing_runtime_loads_nothing_heavy(tmp_path):
    done = run_script("""
        import sys, runtime
        runtime.patch_environment("cpu")
        print([m for m in ("torch", "torch_xla", "accelerate", "jax", "tensorflow", "numpy") if m in sys.modules])
        """, tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_versions_that_do_not_fit_are_refused(monkeypatch):
    versions = {"torch": "2.9.0", "torch_xla": "2.8.0", "accelerate": "1.15.0", "libtpu": None}
    monkeypatch.setattr(rt, "installed_version", versions.get)
    with pytest.raises(rt.UserError, match="do not fit together"):
        rt.check_versions(rt.Platform("tpu", 8, ""))
    versions.update(torch_xla="2.9.0", accelerate="1.6.0")
    with pytest.raises(rt.UserError, match="accelerate>=1.7"):
        rt.check_versions(rt.Platform("tpu", 8, ""))


def test_accelerate_loaded_under_other_settings_is_refused(tmp_path):
    done = run_script("import accelerate, runtime; runtime.patch_environment('cpu')", tmp_path, check=False)
    assert "restart the kernel" in done.stdout.splitlines()[-1] and done.returncode


# ---- launching real processes --------------------------------------------------------------------------------------------

CPU = rt.Platform("cpu", 1, "test")


def write_world(folder):
    runtime = rt.Runtime("fp32")
    (folder / f"rank{runtime.rank}").write_text(f"{runtime.world_size} {os.getpid()} {torch.get_num_threads()}")
    runtime.barrier()


@pytest.mark.parametrize("processes", [1, 2, 1, 3])
def test_workers_form_one_world_again_and_again_in_one_parent(tmp_path, processes):
    rt.launch(write_world, (tmp_path,), CPU, processes)
    worlds = [path.read_text().split() for path in sorted(tmp_path.glob("rank*"))]
    assert [int(size) for size, *_ in worlds] == [processes] * processes
    assert str(os.getpid()) not in [pid for _, pid, _ in worlds], "a worker ran in the parent: later forks would suffer"
    assert len({pid for _, pid, _ in worlds}) == processes


def test_no_worker_begins_before_all_are_forked(tmp_path, monkeypatch):
    """One that did would be answered by a thread of the launcher, whose lock the next fork could then inherit, held."""
    def count_siblings():
        siblings = len(psutil.Process(os.getppid()).children())
        (tmp_path / str(os.getpid())).write_text(str(siblings))
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: time.sleep(0.3) or fork())
    rt.launch(count_siblings, (), CPU, 4)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["4"] * 4


def test_without_the_cpu_variable_two_processes_would_be_two_worlds_and_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    with pytest.raises(rt.WorkerFailed, match="asked for 2 processes"):
        rt.launch(lambda: rt.Runtime("fp32", 2), (), CPU, 2)


def fail_in_rank_one(how):
    runtime = rt.Runtime("fp32")
    if runtime.rank == 1:
        how()
    time.sleep(120)


def test_the_first_failing_ranks_own_words_are_shown(tmp_path):
    def break_down():
        raise ValueError("the reason of rank one")
    begun = time.time()
    with pytest.raises(rt.WorkerFailed, match=r"(?s)ValueError: the reason of rank one\n\(rank 1, peak memory") as caught:
        rt.launch(fail_in_rank_one, (break_down,), CPU, 2, tmp_path)
    assert "break_down" in str(caught.value) and time.time() - begun < 60
    assert not [child for child in __import__("multiprocessing").active_children()]


def test_the_next_launch_works_while_the_failure_of_the_last_is_still_held(tmp_path):
    """A kernel keeps the last exception; what it refers to must not reach the next launch's children."""
    def break_down():
        raise ValueError("first launch")
    with pytest.raises(rt.WorkerFailed) as held:
        rt.launch(fail_in_rank_one, (break_down,), CPU, 2)
    for _ in range(3):
        rt.launch(write_world, (tmp_path,), CPU, 2)
    assert len(list(tmp_path.glob("rank*"))) == 2 and held.value.__context__ is None


def fail_or_wait(number):
    if number == 1:
        raise ValueError("the reason of number one")
    time.sleep(120)


def test_ranks_that_wait_for_a_failed_one_are_ended(tmp_path, monkeypatch):
    """torch_xla's spawn waits for all its processes, in a pool like this one; a rank in a reduction would wait for ever."""
    import concurrent.futures
    import multiprocessing

    def like_xmp_spawn(worker, args, platform, count):
        with concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as pool:
            list(pool.map(worker, range(count)))

    monkeypatch.setattr(rt, "_start", like_xmp_spawn)
    begun = time.time()
    with pytest.raises(rt.WorkerFailed, match="the reason of number one"):
        rt.launch(fail_or_wait, (), CPU, 2)
    assert time.time() - begun < 60


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_ended_by_the_system_is_told_from_an_exception(processes):
    def die():
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(rt.WorkerFailed, match="ended by the system"):
        rt.launch(die if processes == 1 else lambda: fail_in_rank_one(die), (), CPU, processes)


def test_a_users_mistake_inside_a_worker_stays_one_sentence():
    def refuse():
        raise rt.UserError("one sentence")
    with pytest.raises(rt.UserError, match="^one sentence$"):
        rt.launch(refuse, (), CPU, 1)


def test_an_accelerator_made_before_the_launch_is_named(tmp_path):
    done = run_script("""
        import runtime
        platform = runtime.patch_environment("cpu")
        from accelerate import Accelerator
        Accelerator()
        runtime.launch(print, (), platform, 2)
        """, tmp_path, check=False)
    assert "an Accelerator was created" in done.stdout.splitlines()[-1] and "Traceback" not in done.stdout


def test_an_import_that_opens_the_gpus_before_the_launch_is_named(monkeypatch):
    import types
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    with pytest.raises(rt.UserError, match="bitsandbytes, which opens CUDA"):
        rt.launch(print, (), rt.Platform("gpu", 2, "test"))


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupt_leaves_no_worker_behind(tmp_path, processes):
    code = f"""
        import os, time, runtime
        platform = runtime.patch_environment("cpu")
        def work():
            rank = runtime.Runtime("fp32").rank
            open(f"pid{{rank}}", "w").write(str(os.getpid()))
            time.sleep(300)
        runtime.launch(work, (), platform, {processes})
        """
    import textwrap
    (tmp_path / "s.py").write_text(textwrap.dedent(code))
    parent = subprocess.Popen([sys.executable, "s.py"], cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
    deadline = time.time() + 60
    while len([p for p in tmp_path.glob("pid*") if p.read_text()]) < processes and time.time() < deadline:
        time.sleep(0.1)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == processes
    parent.send_signal(signal.SIGINT)       # to the parent alone, as a notebook's stop button does
    parent.wait(timeout=30)
    time.sleep(0.5)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.parametrize("platform, asked", [(rt.Platform("tpu", 8, ""), 4), (rt.Platform("gpu", 2, ""), 3)])
def test_a_number_of_processes_that_cannot_be_had_is_refused(platform, asked):
    with pytest.raises(rt.UserError, match=f"processes={asked}"):
        rt.resolve_processes(platform, asked)


def test_under_torchrun_the_worker_runs_where_it_is(monkeypatch):
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "1")
    ran = []
    rt.launch(lambda: ran.append(os.getpid()), (), CPU)
    assert ran == [os.getpid()]


# ---- code that is edited in a notebook --------------------------------------------------------------------------------------

def test_edited_code_is_the_code_that_runs_even_within_one_second(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    part = tmp_path / "edited_part.py"
    part.write_text("X = 1\n")
    os.utime(part, (1e9, 1e9))
    (tmp_path / "edited.py").write_text("import edited_part\ndef value(): return edited_part.X\n")
    assert rt.load_fresh("edited", tmp_path).value() == 1
    assert list(tmp_path.glob("__pycache__/edited_part*.pyc"))
    part.write_text("X = 2\n")
    os.utime(part, (1e9, 1e9))
    assert rt.load_fresh("edited", tmp_path).value() == 2
    hashes = capsys.readouterr().out.splitlines()
    assert hashes[0].split("edited_part ")[1] != hashes[1].split("edited_part ")[1]
    (tmp_path / "edited_part.py").write_text("X = (\n")
    with pytest.raises(rt.UserError, match="edited_part.py line 1 is not valid Python"):
        rt.load_fresh("edited", tmp_path)


# ---- numbers ---------------------------------------------------------------------------------------------------------------

def test_fp16_is_chosen_for_a_t4_by_capability():
    cuda = torch.device("cuda")
    assert rt.choose_precision("auto", cuda, (7, 5)) == "fp16" and rt.choose_precision("auto", cuda, (8, 0)) == "bf16"
    assert rt.choose_precision("auto", torch.device("cpu")) == "fp32" and rt.choose_precision("auto", torch.device("xla")) == "bf16"
    with pytest.raises(rt.UserError, match="does not suit a TPU"):
        rt.choose_precision("fp16", torch.device("xla"))


def clip_two_ranks(folder):
    runtime = rt.Runtime("fp32", 2)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(2):                                      # accumulated over two backward passes
        (weight * torch.tensor([3.0, 0, 0, 0] if runtime.rank == 0 else [0, 4.0, 0, 0])).sum().backward()
    norm = runtime.optimizer_step(optimizer, max_norm=1.0)
    torch.save((norm, weight.detach()), folder / f"rank{runtime.rank}.pt")


def test_the_norm_is_that_of_the_mean_gradient_and_clipped_once(tmp_path):
    rt.launch(clip_two_ranks, (tmp_path,), CPU, 2)
    for rank in (0, 1):
        norm, weight = torch.load(tmp_path / f"rank{rank}.pt")
        assert norm == pytest.approx(5.0)                   # the mean gradient is (3, 4, 0, 0)
        assert weight.tolist() == pytest.approx([-0.6, -0.8, 0, 0], abs=1e-6)


def test_fp16_gradients_are_unscaled_before_the_norm_and_an_overflow_skips_the_step():
    """On the CPU's own fp16 autocast: the scaler is the same class that serves the T4."""
    rt.launch(overflow_in_fp16, (), CPU, 1)


def overflow_in_fp16():
    runtime = rt.Runtime("fp16")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    runtime.scaler.scale((weight * torch.tensor([3.0, 4.0])).sum()).backward()
    assert weight.grad.abs().max() > 1000
    assert runtime.optimizer_step(optimizer, max_norm=1.0) == pytest.approx(5.0)
    assert weight.tolist() == pytest.approx([0.4, 0.2], abs=1e-6)
    scale = runtime.scaler.get_scale()
    runtime.scaler.scale((weight * float("inf")).sum()).backward()
    runtime.optimizer_step(optimizer, max_norm=1.0)
    assert weight.tolist() == pytest.approx([0.4, 0.2], abs=1e-6) and runtime.scaler.get_scale() < scale


def compare_replicas():
    runtime = rt.Runtime("fp32", 2)
    tensors = {"same": torch.ones(3), "other": torch.ones(3)}
    runtime.check_replicas(tensors, "at first")
    if runtime.rank == 1:
        tensors["other"][1] += 1e-6
    runtime.check_replicas(tensors, "at step 7")


def test_replicas_that_drift_apart_are_named():
    with pytest.raises(rt.WorkerFailed, match=r"at step 7: the replicas hold different weights in 1 of 2 tensors \(other\)"):
        rt.launch(compare_replicas, (), CPU, 2)


def test_seeds_differ_for_every_step_and_rank_and_repeat():
    seeds = {rt.mix_seed(1337, step, rank) for step in range(100) for rank in range(8)}
    assert len(seeds) == 800 and rt.mix_seed(1, 23) != rt.mix_seed(12, 3) and rt.mix_seed(5) == rt.mix_seed(5)


def test_tpu_kinds():
    assert [rt.tpu_kind(name) for name in ("v5litepod-8", "v5e-1", "v6e-1", "v4-8")] == ["v5e", "v5e", "v6e", "v4"]


def test_no_module_but_the_runtime_knows_torch_xla():
    from pathlib import Path
    root = Path(__file__).resolve().parents[1]
    allowed = {"runtime.py", "virtual_tpu.py", "preflight.py"}
    users = {path.name for folder in ("py", "notebooks", "data_prep") for path in (root / folder).glob("*.py")
             if re.search(r"^\s*(import|from) torch_xla\b", path.read_text(), re.MULTILINE)}
    assert users == allowed
