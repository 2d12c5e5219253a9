"""Workers that the rehearsal's tests launch, right ones and faulty ones. Each runs in a fresh Python:

    VIRTUAL_TPU_DEVICES=4 python tests/virtual_workers.py eval_on_rank_0

A line that the detector must name carries a `# HERE` mark; the tests look these up, so no line number is written down.
"""
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "py"))

import runtime as rt  # noqa: E402


def start():
    """(runtime, model, optimizer) of a tiny network, equal on all ranks."""
    import torch
    runtime = rt.Runtime("bf16")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(runtime.device)
    return runtime, model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(runtime, model, optimizer, samples: int = 8):
    import torch
    loss = model(torch.rand(samples, 4).to(runtime.device)).square().mean()
    loss.backward()
    runtime.optimizer_step(optimizer, 1.0)
    return loss.detach()


# ---- faulty: each leaves the common path in its own way --------------------------------------------------------------

def eval_on_rank_0():
    import torch
    runtime, model, optimizer = start()
    for step in range(4):
        train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others
        if step == 2 and runtime.is_main:
            with torch.no_grad():
                model(torch.rand(8, 4).to(runtime.device)).mean()
            runtime.sync()                                                  # HERE the odd one


def gather_on_rank_0():
    runtime, model, optimizer = start()
    for _ in range(3):
        loss = train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others
        if runtime.accelerator.process_index == 0:
            print("loss", runtime.accelerator.gather(loss).mean())          # HERE the odd one


def reduce_on_rank_0():
    """The form without a sync of its own: the reduction is read at once."""
    runtime, model, optimizer = start()
    for _ in range(3):
        loss = train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others
        if runtime.rank == 0:
            print("loss", runtime.all_reduce(loss).item())                  # HERE the odd one


def save_that_one_rank_skips():
    """The best loss so far is each rank's own, so they disagree on whether to save."""
    runtime, model, optimizer = start()
    for _ in range(3):
        train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the odd one
        if runtime.rank != 2:
            runtime.check_replicas(dict(model.named_parameters()), "at the save")   # HERE the others


def stop_by_own_clock():
    runtime, model, optimizer = start()
    ends = time.monotonic() + (600 if runtime.rank != 1 else 0)
    for _ in range(10):
        train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others
        if time.monotonic() > ends:
            break
    runtime.barrier()                                                       # HERE the odd one


def one_step_shorter():
    runtime, model, optimizer = start()
    for _ in range(4 if runtime.rank == 3 else 5):
        train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others # HERE the odd one


def branch_by_data():
    runtime, model, optimizer = start()
    for step in range(3):
        loss = train_step(runtime, model, optimizer)
        if step == 2 and runtime.rank == 1:                                 # as if this rank's loss were a spike
            loss = loss.clamp(max=1.0) * 2
        runtime.sync()                                                      # HERE the others # HERE the odd one


def ragged_on_one_rank():
    """The same operations on another shape, and a shape that every rank has compiled before."""
    runtime, model, optimizer = start()
    for step in range(4):
        ragged = step == 1 or (step == 3 and runtime.rank == 2)
        train_step(runtime, model, optimizer, samples=6 if ragged else 8)
        runtime.sync()                                                      # HERE the others # HERE the odd one


def stuck():
    runtime, model, optimizer = start()
    for step in range(3):
        train_step(runtime, model, optimizer)
        runtime.sync()                                                      # HERE the others
        while step == 1 and runtime.rank == 2:
            time.sleep(0.1)                                                 # HERE the odd one


def raises():
    runtime, model, optimizer = start()
    for step in range(3):
        train_step(runtime, model, optimizer)
        runtime.sync()
        if step == 1 and runtime.rank == 3:
            raise ValueError("this rank's file is broken")                  # HERE the odd one


# ---- right: they must run through ------------------------------------------------------------------------------------

def own_random_state():
    """Equal seeds give equal weights, unequal seeds unequal numbers, and neither disturbs another rank."""
    import random

    import numpy
    import torch
    runtime, model, _ = start()
    runtime.check_replicas(dict(model.named_parameters()), "after equal seeds")
    torch.manual_seed(runtime.rank)
    numpy.random.seed(runtime.rank)
    random.seed(runtime.rank)
    runtime.sync()
    drawn = torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()])
    runtime.barrier()
    generator = torch.Generator().manual_seed(runtime.rank)
    assert drawn[0] == torch.rand((), generator=generator)
    assert drawn[1] == torch.tensor(numpy.random.RandomState(runtime.rank).rand())
    assert drawn[2] == torch.tensor(random.Random(runtime.rank).random())
    print(f"rank {runtime.rank} drew its own numbers", flush=True)


def meets_in_every_way():
    """Barrier, rendezvous with words, gather, reduce, a reduction read without a sync, work on the main rank alone."""
    import torch
    import torch_xla.core.xla_model as xm
    runtime, model, optimizer = start()
    size, rank = runtime.world_size, runtime.rank
    runtime.accelerator.wait_for_everyone()
    assert xm.rendezvous("words", f"rank {rank}".encode()) == [f"rank {number}".encode() for number in range(size)]
    mine = torch.tensor([float(rank)]).to(runtime.device)   # with a dimension: else 0 and 1 would be constants
    assert runtime.accelerator.gather(mine).tolist() == list(range(size))
    assert runtime.accelerator.reduce(mine, "mean").item() == (size - 1) / 2
    assert runtime.all_reduce(mine, "sum").item() == sum(range(size))
    assert float(runtime.all_reduce(mine, "max")) == size - 1
    if runtime.is_main:
        assert [p.detach().cpu() for p in model.parameters()]
    with runtime.accelerator.main_process_first():
        time.sleep(0.01)
    for _ in range(3):
        train_step(runtime, model, optimizer)
        runtime.sync()
    runtime.check_replicas(dict(model.named_parameters()), "at the end")
    print(f"rank {rank} of {size} met the others", flush=True)


def meets_often():
    """Two programs a step, one with a collective and with donated buffers, 300 times."""
    import torch
    runtime, *_ = start()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(12)]).to(runtime.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(300):
        model(torch.rand(16, 64).to(runtime.device)).square().mean().backward()
        runtime.sync()
        runtime.optimizer_step(optimizer, 1.0)
        runtime.sync()
    print(f"rank {runtime.rank} met the others 600 times", flush=True)


def leaves_cycles():
    """Garbage that only Python's collector finds, and a collector that may run at any moment."""
    import threading
    runtime, model, optimizer = start()
    if runtime.is_main:
        threading.Thread(target=collect_for_ever, daemon=True).start()
    for _ in range(10):
        loss = train_step(runtime, model, optimizer)
        cycle = SimpleNamespace(loss=loss * 2, more=[p.detach() + 1 for p in model.parameters()])
        cycle.itself = cycle
        del cycle
        runtime.sync()
    print(f"rank {runtime.rank} left its garbage", flush=True)


def collect_for_ever():
    import gc
    while True:
        gc.collect()
        time.sleep(0.03)


# ---- the GPT's own worker, with probes beside it ---------------------------------------------------------------------

RUNS = {}           # {rank: (model, optimizer)} of the run in this process
PROBE = {}          # where the probe writes


def probed_worker(config, model=None):
    """train_gpt's worker, unchanged; afterwards each rank writes a digest of its weights, and how they are stored."""
    import hashlib
    import json
    import torch_xla.runtime as xr
    ORIGINALS["train_worker"](config, model)
    trained, optimizer = RUNS[xr.global_ordinal()]
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in trained.parameters())).hexdigest()
    dtypes = sorted({str(value.dtype) for state in optimizer.state.values() for value in state.values()}
                    | {str(p.dtype) for p in trained.parameters()})
    with open(PROBE["folder"] + f"/rank_{xr.global_ordinal()}.jsonl", "a") as file:
        file.write(json.dumps({"digest": digest, "dtypes": dtypes}) + "\n")


def remember_run(config, geometry, runtime, resumed, model):
    RUNS[runtime.rank] = ORIGINALS["set_up"](config, geometry, runtime, resumed, model)
    return RUNS[runtime.rank]


def write_with_counters(log, **record):
    """RunLog.write, with torch_xla's counters added to the record."""
    import torch_xla.debug.metrics as metrics
    reads = metrics.metric_data("TransferFromDeviceTime")
    reduces = [metrics.counter_value(name) or 0 for name in ("xla::AllReduce", "xla::all_reduce")]     # with a scale, and without
    counts = dict(all_reduces=sum(reduces), reads=reads[0] if reads else 0,
                  scalars=metrics.counter_value("aten::_local_scalar_dense") or 0)
    ORIGINALS["write"](log, **record, counters=counts)


ORIGINALS = {}


def train_probed_gpt(folder: str, platform_name: str, settings: dict) -> None:
    """Train a GPT with the probes; with stop_at among the settings, the run stops there and is then resumed."""
    platform = rt.patch_environment(platform_name)
    import resume_gpt
    import telemetry
    import train_gpt
    ORIGINALS.update(train_worker=train_gpt.train_worker, set_up=train_gpt.set_up, write=telemetry.RunLog.write)
    PROBE.update(folder=folder)
    train_gpt.train_worker, train_gpt.set_up, telemetry.RunLog.write = probed_worker, remember_run, write_with_counters
    config = train_gpt.make_config("tiny", **{"platform": platform_name, "sample_tokens": 0, **settings})
    train_gpt.launch(config, platform)
    if config.stop_at:
        resume_gpt.resume(config.run_folder, platform)


def main() -> None:
    if sys.argv[1] == "gpt":
        import json
        return train_probed_gpt(**json.loads(sys.argv[2]))
    rt.launch(globals()[sys.argv[1]], (), rt.patch_environment("virtual-tpu"))


if __name__ == "__main__":
    rt.run_main(main)
