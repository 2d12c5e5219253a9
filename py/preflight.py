"""Ask the TPU's own compiler, without a TPU, whether a training step fits the chip and what it will cost.

    python py/preflight.py --preset gpt2-124m --chip v5e-8                  # any setting of train_gpt.py may follow
    python py/preflight.py --preset gpt2-124m --chip v5e-8 --search         # the largest micro_batch that fits
    python py/preflight.py --template mlp --chip v5e-8 --json report.json

It needs jax, jaxlib and libtpu at the versions that torch_xla names (requirements-preflight.txt) and no TPU. Two child
processes do the work. The first runs the template's own train_worker on XLA's CPU backend with a runtime that believes
in as many replicas as the chip has and that, instead of executing, keeps the program of every sync: accumulation,
reduction, clipping and optimizer are the ones that a TPU would get. The second gives each program to libtpu's compiler
for the described chip. All times are that compiler's estimates, never measurements.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import runtime as rt
from runtime import UserError

GIB = 2 ** 30


@dataclass(frozen=True)
class Chip:
    """A TPU slice as its compiler and its data sheet describe it."""
    name: str
    topology: str           # as jax.experimental.topologies calls it
    accelerator: str        # TPU_ACCELERATOR_TYPE
    replicas: int
    host_bounds: tuple      # chips of one host along x, y, z
    memory_gib: float       # what the compiler leaves to a program, from its own out-of-memory report
    peak_flops: float       # bf16, a chip
    clock: float            # Hz: peak_flops over the flops that all matrix units do in a cycle
    link_bytes: float       # bytes a second that a ring all-reduce moves through a chip, one way (data sheet)

    @property
    def kind(self) -> str:
        return rt.tpu_kind(self.accelerator)


# v5e: four matrix units of 128 x 128. v6e: four of 256 x 256 (the compiler's own estimate of a large product exceeds
# what two could do at any clock that gives the data sheet's 918 TFLOP/s).
CHIPS = {chip.name: chip for chip in (
    Chip("v5e-8", "v5e:2x4", "v5litepod-8", 8, (2, 4, 1), 15.75, 197e12, 197e12 / (4 * 2 * 128 ** 2), 45e9),
    Chip("v5e-1", "v5e:1x1", "v5litepod-1", 1, (1, 1, 1), 15.75, 197e12, 197e12 / (4 * 2 * 128 ** 2), 45e9),
    Chip("v6e-1", "v6e:1x1", "v6e-1", 1, (1, 1, 1), 31.25, 918e12, 918e12 / (4 * 2 * 256 ** 2), 90e9),
)}

REQUIRED = ("jax", "jaxlib", "libtpu")


# ---- first child: catch the programs of a template's worker ----------------------------------------------------------

@dataclass
class Program:
    """What one sync would have handed to the device."""
    kind: str                       # 'micro-step', 'optimizer step', 'evaluation', 'other'
    identity: str                   # equal for equal programs, whatever their names
    file: str                       # serialized HLO, in the folder of the trace
    donated: list                   # numbers of the arguments whose buffers the program may reuse, as torch_xla decides
    resident_bytes: int             # held on the device meanwhile without being an argument
    per_step: int = 0               # executions in one optimizer step once the training is under way
    dtypes: dict = field(default_factory=dict)      # {'parameters': {'float32': bytes}, ...}


class Caught(Exception):
    """Enough programs were seen: leaves the worker's loop."""


STEPS_SEEN = 3          # the first optimizer step may differ from the second (it should not); the third must be the second


class Tracer:
    """Stands in for sync: keeps the pending program and gives its results buffers without content."""

    def __init__(self, folder: Path):
        import torch_xla
        self.xla, self.folder, self.device = torch_xla._XLAC, folder, torch_xla.device()
        self.steps, self.steps_at_last_sync, self.optimizer = 0, 0, None
        self.programs, self.ran = {}, []            # by identity; (optimizer step, identity) of every sync
        self.before = {}                            # id(tensor) -> (weak reference, its number on XLA) after the last sync

    def sync(self, kind: str) -> None:
        tensors = self.live_tensors()
        pending = [t for t, wanted in zip(tensors, self.xla._check_tensor_need_materialization(tensors)) if wanted]
        if pending:
            pending.sort(key=self.xla._xla_get_tensor_id)
            if kind == "train_worker":
                kind = "micro-step" if self.steps == self.steps_at_last_sync else "optimizer step"
            self.keep(kind, tensors, pending)
        self.xla._clear_pending_irs(str(self.device))
        self.before = {id(t): (weakref.ref(t), self.xla._xla_get_tensor_id(t)) for t in tensors}
        self.steps_at_last_sync = self.steps
        if self.steps >= STEPS_SEEN:
            raise Caught

    def live_tensors(self) -> list:
        """Every tensor on the device that Python can reach, gradients included."""
        import gc

        import torch
        found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.device.type == "xla"]
        found += [t.grad for t in found if t.is_leaf and t.grad is not None]
        return list({self.xla._xla_get_tensor_id(t): t for t in found}.values())

    def keep(self, kind: str, tensors: list, pending: list) -> None:
        outputs = pending + [self.base_of(t) for t in pending if self.has_hidden_base(t)]
        numbers, arguments = self.xla._get_tensors_xla_device_data_node(outputs)
        donated = self.donated(numbers, pending)
        identity = f"{hash((self.xla._get_graph_hash(outputs), tuple(donated))) & (2 ** 64 - 1):016x}"
        self.ran.append((self.steps_at_last_sync, identity))
        if identity in self.programs:
            return
        file = f"program_{len(self.programs)}.hlo"
        (self.folder / file).write_bytes(self.xla._get_xla_tensors_hlo_proto(outputs))
        known = set(numbers)
        pending_numbers = {self.xla._xla_get_tensor_id(t) for t in pending}
        resident = [t for t in tensors if self.xla._xla_get_tensor_id(t) not in known | pending_numbers]
        self.programs[identity] = Program(kind, identity, file, donated, sum(map(held_bytes, resident)),
                                          dtypes=self.dtypes_of(tensors))

    def has_hidden_base(self, tensor) -> bool:
        """True for a view, such as the transposed gradient of a weight: torch keeps what it is a view of alive too."""
        import torch
        return torch._is_functional_tensor(tensor) and not torch._is_functional_tensor_base(tensor)

    def base_of(self, tensor):
        """The hidden base, computed back from the view: XLA simplifies the way there and back to nothing."""
        base = tensor.detach().t() if tensor.dim() == 2 else tensor.detach().reshape(1, -1)
        return base

    def donated(self, numbers: list, pending: list) -> list:
        """Arguments that this program overwrites: the same Python tensor held them before and is computed anew."""
        overwritten = set()
        for tensor in pending:
            reference, number = self.before.get(id(tensor), (lambda: None, None))
            if reference() is tensor:
                overwritten.add(number)
        return [position for position, number in enumerate(numbers) if number in overwritten]

    def dtypes_of(self, tensors: list) -> dict:
        """Bytes by dtype of parameters, gradients and optimizer state."""
        import torch
        state = {id(v) for s in (self.optimizer.state.values() if self.optimizer else ()) for v in s.values()}
        gradients = {id(t.grad) for t in tensors if t.is_leaf and t.grad is not None}
        table = defaultdict(lambda: defaultdict(int))
        for t in tensors:
            role = ("parameters" if isinstance(t, torch.nn.Parameter) else "optimizer state" if id(t) in state
                    else "gradients between programs" if id(t) in gradients else None)
            if role and t.numel() > 1:
                table[role][str(t.dtype).removeprefix("torch.")] += t.numel() * t.element_size()
        return {role: dict(row) for role, row in table.items()}

    def results(self) -> list:
        """The programs, with how often each runs in an optimizer step once training is under way."""
        for step, identity in self.ran:
            program = self.programs[identity]
            if step == STEPS_SEEN - 1 and program.kind in ("micro-step", "optimizer step"):
                program.per_step += 1
        return list(self.programs.values())


def held_bytes(tensor) -> int:
    return tensor.numel() * tensor.element_size()


def calling_function() -> str:
    """The name of the template's function that asked for a sync."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename in (__file__, rt.__file__):
        frame = frame.f_back
    return frame.f_code.co_name


def preflight_runtime(chip: Chip, tracer: Tracer):
    """A Runtime that sees the chip's replicas and hands its programs to the tracer."""

    class PreflightRuntime(rt.Runtime):
        def __init__(self, precision="auto", processes=0):
            super().__init__(precision)
            self.world_size = chip.replicas

        def sync(self):
            name = calling_function()
            tracer.sync({"train_worker": name, "evaluate": "evaluation"}.get(name, "other"))

        def host_values(self, tensor):
            tracer.sync("other")
            import torch
            return torch.zeros(tensor.shape).tolist()

        def optimizer_step(self, optimizer, max_norm):
            tracer.optimizer = optimizer
            tracer.steps += 1
            with scope(tracer, "optimizer_step"):
                return super().optimizer_step(optimizer, max_norm)

        def device_kind(self):
            return chip.kind

    return PreflightRuntime


@contextlib.contextmanager
def scope(tracer: Tracer, name: str):
    """Operations traced inside carry the name into the compiled program."""
    pusher = tracer.xla.profiler.scope_pusher(name)
    try:
        yield
    finally:
        del pusher


def name_modules(tracer: Tracer) -> None:
    """Let every operation carry the name of the module that caused it, in the backward pass too. Adds no operation."""
    import torch.nn.modules.module as hooks
    names, stack = {}, []

    def before(module, inputs):
        if not stack:
            names.update({id(m): (name.rsplit(".", 1)[-1] or "model") for name, m in module.named_modules()})
        parent = stack[-1][0] if stack else ""
        own = names.get(id(module), type(module).__name__)
        stack.append((f"{parent}.{own}" if parent else own, tracer.xla.profiler.scope_pusher(own)))

    def after(module, inputs, output):
        path, _ = stack.pop()
        name_backward(tracer, output, path)

    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after)


def name_backward(tracer: Tracer, output, path: str) -> None:
    """Name the backward operations of what was computed since the inner modules were named."""
    todo = [output.grad_fn] if getattr(output, "grad_fn", None) is not None else []
    while todo:
        node = todo.pop()
        if node is None or "named" in node.metadata or node.name().endswith("AccumulateGrad"):
            continue
        node.metadata["named"], held = path, []
        node.register_prehook(lambda grads, held=held: held.append(
            tracer.xla.profiler.scope_pusher(path + ".backward")))
        node.register_hook(lambda grads_in, grads_out, held=held: held.clear())
        todo += [following for following, _ in node.next_functions]


def trace(request: dict, folder: Path) -> None:
    """Run the template's worker under a tracer; write programs.json and the HLO files. Runs in a child process."""
    chip = CHIPS[request["chip"]]
    rt.patch_environment("xla-cpu")
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"        # torch_xla leaves reductions out where it sees one device
    os.environ["XLA_HLO_DEBUG"] = "1"               # names in the program
    import torch_xla
    tracer = Tracer(folder)
    if request["names"]:
        name_modules(tracer)
    rt.Runtime = preflight_runtime(chip, tracer)
    worker, arguments, facts = TEMPLATES[request["template"]](request["settings"], chip, folder)
    with contextlib.suppress(Caught):
        worker(*arguments)
    flags = torch_xla_compiler_flags(chip)
    (folder / "programs.json").write_text(json.dumps(dict(
        facts=facts, flags=flags, programs=[dataclasses.asdict(p) for p in tracer.results()])))


def torch_xla_compiler_flags(chip: Chip) -> str:
    """The flags that torch_xla gives to libtpu on such a chip."""
    from unittest import mock

    import torch_xla
    with mock.patch.object(torch_xla.tpu, "version", lambda: int(chip.kind[1])), mock.patch.dict(os.environ):
        torch_xla._setup_libtpu_flags()
        return os.environ["LIBTPU_INIT_ARGS"].strip()


def gpt_template(settings: dict, chip: Chip, folder: Path):
    """train_gpt's worker on stand-in tokens: shapes are all that matters here."""
    import gpt
    import train_gpt
    preset = settings.pop("preset", "gpt2-124m")
    config = train_gpt.make_config(preset, **settings)
    vocabulary = train_gpt.padded_vocabulary(config.vocab_size or 257)
    write_stand_in_shards(folder / "shards", vocabulary, config.T)
    config = dataclasses.replace(config, vocab_size=vocabulary, data_folder=str(folder / "shards"),
                                 run_folder=str(folder / "run"), eval_windows=1, resume_from="", processes=0)
    micro_steps = train_gpt.count_micro_steps(config, chip.replicas)
    (folder / "run").mkdir()
    geometry = config.model(vocabulary)
    facts = dict(tokens_per_step=config.tokens_per_step, flops_per_token=gpt.flops_per_token(geometry),
                 micro_batch=config.micro_batch, micro_steps=micro_steps, preset=preset, T=config.T,
                 n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, vocab_size=vocabulary)
    return train_gpt.train_worker, (config,), facts


def write_stand_in_shards(folder: Path, vocabulary: int, T: int) -> None:
    """The smallest shard folder that a run accepts: two windows a split, all of token 0."""
    import hashlib

    import numpy as np

    import token_data
    folder.mkdir()
    dtype = token_data.dtype_for(vocabulary)
    content = np.zeros(2 * T + 1, dtype=dtype).tobytes()
    splits = {}
    for name in ("train", "val"):
        (folder / f"{name}_00000.bin").write_bytes(content)
        shard = dict(file=f"{name}_00000.bin", tokens=2 * T + 1, sha256=hashlib.sha256(content).hexdigest(), max_id=0)
        splits[name] = dict(tokens=2 * T + 1, bytes=2 * T + 1, documents=1, shards=[shard])
    (folder / "manifest.json").write_text(json.dumps(dict(
        format=token_data.FORMAT, version=token_data.VERSION, dtype=dtype, vocab_size=vocabulary, separator=0,
        encoding="none", reference={}, splits=splits)))


def mlp_template(settings: dict, chip: Chip, folder: Path):
    import train_mlp
    config = train_mlp.MLPConfig(**settings)
    matrices = config.hidden * (config.hidden + 3)
    return train_mlp.train_worker, (config, 0), dict(tokens_per_step=config.batch, flops_per_token=6 * matrices,
                                                     micro_batch=config.batch // chip.replicas, micro_steps=1)


TEMPLATES = {"gpt": gpt_template, "mlp": mlp_template}


# ---- second child: the TPU's compiler --------------------------------------------------------------------------------

def compile_programs(request: dict, folder: Path) -> None:
    """Compile the wanted programs of a trace for the chip; write one report a program. Runs in a child process."""
    compiler = Compiler(CHIPS[request["chip"]])
    for name in request["files"]:
        report = compiler.compile((folder / name).read_bytes(), request["donated"][name], folder / f"{name}.txt")
        (folder / f"{name}.json").write_text(json.dumps(report))
        if "error" in report:
            break


class Compiler:
    """libtpu's compiler for a chip that is only described."""

    def __init__(self, chip: Chip):
        import numpy as np
        from jax._src.lib import xla_client
        from jax.experimental import topologies
        self.chip, self.xla_client = chip, xla_client
        bounds = {} if chip.replicas > 1 else dict(chips_per_host_bounds=chip.host_bounds)
        found = topologies.get_topology_desc(chip.topology, platform="tpu", **bounds).devices
        self.devices = tuple(found[:chip.replicas])
        self.options = xla_client.CompileOptions()
        self.options.num_replicas, self.options.num_partitions = chip.replicas, 1
        self.options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([[d.id] for d in self.devices], dtype=np.int32))

    def compile(self, hlo: bytes, donated: list, text_file: Path) -> dict:
        """A report of the compiled program, or {'error': the compiler's words}; the scheduled program goes to text_file."""
        client = self.xla_client
        mlir = client._xla.mlir.xla_computation_to_mlir_module(client.XlaComputation(hlo))
        mlir = mark_donated(mlir.decode() if isinstance(mlir, bytes) else mlir, set(donated))
        begun = time.monotonic()
        try:
            program = self.devices[0].client.compile(mlir.encode(), client.DeviceList(self.devices), self.options)
        except Exception as error:      # out of memory arrives here, in words
            return dict(error=str(error), compile_seconds=time.monotonic() - begun)
        seconds, memory = time.monotonic() - begun, program.get_compiled_memory_stats()
        text = program.hlo_modules()[0].to_string()
        text_file.write_text(text)
        return dict(compile_seconds=seconds, arguments=memory.argument_size_in_bytes,
                    outputs=memory.output_size_in_bytes, aliased=memory.alias_size_in_bytes,
                    temporary=memory.temp_size_in_bytes, code=memory.generated_code_size_in_bytes)


def mark_donated(mlir: str, donated: set) -> str:
    """The module with `jax.buffer_donor` on those arguments of its main function."""
    head, start, rest = mlir.partition("@main(")
    arguments, arrow, body = rest.partition(") -> ")

    def mark(match):
        number, kind, attributes = match.groups()
        if int(number) not in donated:
            return match[0]
        inner = (attributes or "{}").strip()[1:-1].strip()
        return f"%arg{number}: {kind} {{{inner + ', ' if inner else ''}jax.buffer_donor = true}}"

    arguments = re.sub(r"%arg(\d+): (tensor<[^>]*>)( \{[^}]*\})?", mark, arguments)
    return head + start + arguments + arrow + body
