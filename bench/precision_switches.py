"""What `mixed_precision`, `downcast_bf16` and their environment variables really do: measured, as two Markdown tables.

    python bench/precision_switches.py          # prints them; docs/accelerate_config.md holds this very output

Each row is a process of its own, forked before any device is opened, since torch_xla reads the variables once. It runs
on XLA's CPU backend, where the variables retype tensors as they do for a TPU. Accelerate takes its TPU branch only where
torch_xla says that the device is a TPU: the rows marked "TPU" have that one answer, `torch_xla.runtime.device_type()`,
replaced, and nothing else.
"""
import json
import multiprocessing
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

SWITCHES = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "ACCELERATE_DOWNCAST_BF16", "ACCELERATE_MIXED_PRECISION")


# ---- first table: one training step under each switch ----------------------------------------------------------------

# (what the reader sees, variables, Accelerator's argument, torch_xla says TPU, our own autocast)
TRAININGS = [
    ("nothing", {}, None, True, False),
    ("`mixed_precision=\"bf16\"`, XLA on a CPU", {}, "bf16", False, False),
    ("`mixed_precision=\"bf16\"`, TPU", {}, "bf16", True, False),
    ("the same with `ACCELERATE_DOWNCAST_BF16=1`, TPU", {"ACCELERATE_DOWNCAST_BF16": "1"}, "bf16", True, False),
    ("the same with `ACCELERATE_DOWNCAST_BF16=no`, TPU", {"ACCELERATE_DOWNCAST_BF16": "no"}, "bf16", True, False),
    ("the same with `XLA_DOWNCAST_BF16=1`, TPU", {"XLA_DOWNCAST_BF16": "1"}, "bf16", True, False),
    ("`ACCELERATE_MIXED_PRECISION=bf16`, TPU", {"ACCELERATE_MIXED_PRECISION": "bf16"}, None, True, False),
    ("`mixed_precision=\"fp16\"`, TPU", {}, "fp16", True, False),
    ("`XLA_USE_BF16=1`", {"XLA_USE_BF16": "1"}, None, True, False),
    ("`XLA_DOWNCAST_BF16=1`", {"XLA_DOWNCAST_BF16": "1"}, None, True, False),
    ("`XLA_USE_BF16=0`", {"XLA_USE_BF16": "0"}, None, True, False),
    ("**these templates**: `torch.autocast(\"xla\", dtype=torch.bfloat16)`", {}, "no", True, True),
]

def train_one_step(precision: str | None, is_tpu: bool, own_autocast: bool) -> dict:
    """One AdamW step of a Linear(8, 8) through Accelerate; what torch says, and what the programs are really given."""
    import torch
    import torch_xla
    from accelerate import Accelerator
    if is_tpu:
        torch_xla.runtime.device_type = lambda: "TPU"
    try:
        accelerator = Accelerator(mixed_precision=precision)
    except ValueError as error:
        return dict(refused=str(error).split(" (not")[0])
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(8, 8).to(accelerator.device)
    with torch.autocast("xla", dtype=torch.bfloat16) if own_autocast else accelerator.autocast():
        autocast = torch.is_autocast_enabled("xla")
        output = model(x)
    product = next(line for line in torch_xla._XLAC._get_xla_tensors_hlo([output]).splitlines() if " dot(" in line)
    output.float().square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    weight = next(model.parameters())
    double = torch.ones(8, 8, dtype=torch.float64).to(accelerator.device)
    return dict(reports=str(weight.dtype).removeprefix("torch."), weights=stored_as(weight),
                state=stored_as(optimizer.state[weight]["exp_avg"]), product=KINDS.search(product)[1],
                double=stored_as(double), autocast=autocast, sum=round(repeated_sum(accelerator.device), 3))


KINDS = re.compile(r"\b(f64|f32|bf16|f16)\[")


def stored_as(tensor) -> str:
    """The type of the buffer that a program is given for this tensor, whatever torch calls it."""
    import torch_xla
    torch_xla.sync()
    text = torch_xla._XLAC._get_xla_tensors_hlo([tensor * 2])
    return KINDS.search(next(line for line in text.splitlines() if "parameter(" in line and "[8,8]" in line))[1]


def repeated_sum(device) -> float:
    import torch
    import torch_xla
    weight = torch.ones(8, 8).to(device)
    for _ in range(100):
        weight += 0.003
        torch_xla.sync()
    return weight.cpu()[0, 0].item()


def training_row(row: tuple) -> str:
    name, variables, precision, is_tpu, own_autocast = row
    found = in_a_process(train_one_step, variables, precision, is_tpu, own_autocast)
    if "refused" in found:
        return f"| {name} | refused: {found['refused']} | | | | | | |"
    return (f"| {name} | {found['reports']} | {found['weights']} | {found['state']} | {found['product']}"
            f" | {found['double']} | {'on' if found['autocast'] else 'off'} | {found['sum']:g} |")


# ---- second table: what `accelerate launch` hands to the script ------------------------------------------------------

# (what the reader sees, the configuration file, more arguments); torch_xla says TPU in all of them
LOCAL = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\n"
XLA = LOCAL + "distributed_type: XLA\nnum_processes: 8\n"
LAUNCHES = [
    ("`distributed_type: XLA`, `mixed_precision: 'no'`", XLA + "mixed_precision: 'no'\n", []),
    ("`distributed_type: XLA`, `mixed_precision: bf16`", XLA + "mixed_precision: bf16\n", []),
    ("the same, `downcast_bf16: 'yes'`", XLA + "mixed_precision: bf16\ndowncast_bf16: 'yes'\n", []),
    ("the same, `downcast_bf16: true`", XLA + "mixed_precision: bf16\ndowncast_bf16: true\n", []),
    ("the same and `--downcast_bf16` on the command line", XLA + "mixed_precision: bf16\n", ["--downcast_bf16"]),
    ("`distributed_type: 'NO'`, `mixed_precision: bf16`",
     LOCAL + "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: bf16\n", []),
    ("`distributed_type: MULTI_CPU`, `num_processes: 2`",
     LOCAL + "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\nmixed_precision: 'no'\n", []),
    ("`distributed_type: MULTI_GPU`, `use_cpu: true`, `num_processes: 2`",
     LOCAL + "distributed_type: MULTI_GPU\nuse_cpu: true\nnum_processes: 2\nmixed_precision: 'no'\n", []),
]

SHOW = f"""
import json, os
def main():
    if os.environ.get("RANK", "0") == "0":
        seen = {{name: os.environ[name] for name in {SWITCHES!r} if name in os.environ}}
        with open("row.json", "w") as file:
            json.dump(dict(seen=seen, world=int(os.environ.get("WORLD_SIZE", 1))), file)
if __name__ == "__main__":
    main()
"""


def launch(config: str, more: list) -> dict:
    """`accelerate launch` of a script that writes down what it sees; torch_xla says TPU and starts one of the eight."""
    import torch_xla
    import torch_xla.distributed.xla_multiprocessing as xmp
    from accelerate.commands.launch import launch_command, launch_command_parser
    torch_xla.runtime.device_type = lambda: "TPU"
    xmp.spawn = lambda function, args: function(0, *args)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("config.yaml").write_text(config)
        Path("show.py").write_text(SHOW)
        sys.path.insert(0, folder)
        arguments = ["--config_file", "config.yaml", "--main_process_port", "0", *more, "show.py"]
        launch_command(launch_command_parser().parse_args(arguments))
        return json.loads(Path("row.json").read_text())


def launch_row(row: tuple) -> str:
    name, config, more = row
    found = in_a_process(launch, {}, config, more)
    seen = ", ".join(f"`{variable}={value}`" for variable, value in found["seen"].items()) or "nothing"
    starts = "8, by torch_xla" if "XLA" in config else found["world"]
    return f"| {name} | {starts} | {seen} |"


# ---- both ------------------------------------------------------------------------------------------------------------

def in_a_process(measure, variables: dict, *arguments) -> dict:
    """measure(*arguments) in a forked process that has these variables. Raises RuntimeError when it fails."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def child():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # torch_xla's own remarks; a traceback goes to stderr
        os.environ.update(variables)
        writer.send(measure(*arguments))

    process = context.Process(target=child)
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError:
        raise RuntimeError(f"{measure.__name__}{arguments} failed, its traceback is above") from None
    finally:
        process.join()


def tables() -> str:
    import accelerate.commands.launch       # once for all rows; opens no device
    import torch_xla
    assert accelerate and not torch_xla._XLAC._xla_runtime_is_initialized()
    return "\n".join([
        "| switch | torch says | weights | AdamW state | matrix product | a float64 tensor | autocast | 1 + 100 x 0.003 |",
        "|---|---|---|---|---|---|---|---|", *map(training_row, TRAININGS), "",
        "| configuration | processes | the script sees |", "|---|---|---|", *map(launch_row, LAUNCHES)])


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "XLA_", "PJRT_", "CPU_NUM", "USE_"))]:
        del os.environ[name]        # what a shell or a caller left
    os.environ.update(PJRT_DEVICE="CPU", OMP_NUM_THREADS="1")
    warnings.simplefilter("ignore")
    print(tables())
