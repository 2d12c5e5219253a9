"""Ask the TPU's own compiler, without a TPU, whether a training step fits the chip and what it will cost.

    python py/preflight.py --preset gpt2-124m --chip v5e-8                  # any setting of train_gpt.py may follow
    python py/preflight.py --preset gpt2-124m --chip v5e-8 --search         # the largest micro_batch that fits
    python py/preflight.py --template mlp --chip v5e-8 --json report.json
    python py/preflight.py --template images --chip v5e-8                   # ResNet-18; --template classifier: BERT-base

It needs jax, jaxlib and libtpu at the versions that torch_xla names for its TPU extras, and no TPU. Two child
processes do the work. The first runs the template's own train_worker on XLA's CPU backend with a runtime that believes
in as many replicas as the chip has and that, instead of executing, keeps the program of every sync: accumulation,
reduction, clipping and optimizer are the ones that a TPU would get. The second gives each program to libtpu's compiler
for the described chip. All times are that compiler's estimates, never measurements.
"""
import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
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


# Peaks from Google's pages, read 2026-11: docs.cloud.google.com/tpu/docs/v5e (197 TFLOP/s, 16 GB at 819 GB/s, four links of
# together 400 GB/s both ways) and .../v6e (918 TFLOP/s, 32 GB at 1,638 GB/s, 800 GB/s). Links: 45 and 90 GB/s one way, of 50
# and 100, by https://jax-ml.github.io/scaling-book/tpus. The clock is what makes a peak: four matrix units of 128 x 128 on
# v5e; on v6e the page names two of 256 x 256, which would need 3.5 GHz, and the compiler counts with four.
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
        """True for a view, such as the transposed gradient of a weight: torch_xla keeps its base and computes it too.

        A parameter counts as a view of itself since it was moved to the device, and has no second buffer.
        """
        import torch
        return (torch._is_functional_tensor(tensor) and not torch._is_functional_tensor_base(tensor)
                and tensor.dim() > 0 and not isinstance(tensor, torch.nn.Parameter))

    def base_of(self, tensor):
        """A gradient's hidden base, computed back from the view: XLA reduces the way there and back to nothing."""
        return tensor.detach().t() if tensor.dim() == 2 else tensor.detach().reshape(1, -1)

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

        def number(self, value):
            tensor = super().number(value)
            tensor.known = [float(value)]
            return tensor

        def all_reduce(self, tensor, op="mean"):
            result = super().all_reduce(tensor, op)
            if hasattr(tensor, "known"):    # all ranks are this one
                result.known = tensor.known
            return result

        def host_values(self, tensor):
            """What the host put in itself, so that its decisions are the real ones; zeros for what a device would compute."""
            import torch
            tracer.sync("other")
            return getattr(tensor, "known", None) or torch.zeros(tensor.shape).tolist()

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
            names.clear()
            names.update({id(m): f"model.{name}" if name else "model" for name, m in module.named_modules()})
        path = names.get(id(module), type(module).__name__)
        outer = stack[-1][0] + "." if stack else ""
        sources = {getattr(value, "grad_fn", None) for value in inputs}
        stack.append((path, tracer.xla.profiler.scope_pusher(path.removeprefix(outer)), sources))

    def after(module, inputs, output):
        path, _, sources = stack.pop()
        name_backward(tracer, output, path, sources)

    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after)


def name_backward(tracer: Tracer, output, path: str, sources: set) -> None:
    """Name the backward operations of what a module computed from its `sources`; its inner modules named theirs before."""
    todo, seen = [getattr(output, "grad_fn", None)], set(sources)
    while todo:
        node = todo.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        if "named" in node.metadata:
            continue
        node.metadata["named"], open_scope = path, []
        node.register_prehook(lambda grads, s=open_scope: s.append(tracer.xla.profiler.scope_pusher(path + BACKWARD)))
        node.register_hook(lambda grads_in, grads_out, s=open_scope: s.clear())


BACKWARD = "_backward"        # XLA replaces other signs


def trace(request: dict, folder: Path) -> None:
    """Run the template's worker under a tracer; write programs.json and the HLO files. Runs in a child process."""
    chip = CHIPS[request["chip"]]
    divided = is_divided(request["template"], chip)
    os.environ["VIRTUAL_TPU_DEVICES"] = str(chip.replicas)
    rt.patch_environment("virtual-tpu" if divided else "xla-cpu")
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"        # torch_xla leaves reductions out where it sees one device
    os.environ["XLA_HLO_DEBUG"] = "1"               # names in the program
    import torch_xla
    rt.Mesh(divided)        # before anything is on the device
    tracer = Tracer(folder)
    if request["names"]:
        name_modules(tracer)
    rt.Runtime = preflight_runtime(dataclasses.replace(chip, replicas=1) if divided else chip, tracer)
    worker, arguments, facts = find_template(request["template"])(request["settings"], chip, folder)
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
    (folder / "run").mkdir(exist_ok=True)
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
    folder.mkdir(exist_ok=True)
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


def images_template(settings: dict, chip: Chip, folder: Path):
    """train_images' worker on images without content, of CIFAR-10's size: one rank's share of a single batch an epoch."""
    import classification
    import image_data
    import numpy as np
    import train_images
    config = dataclasses.replace(train_images.make_config(settings.pop("preset", "resnet18"), **settings), data="none",
                                 epochs=STEPS_SEEN + 1, eval_every=1, run_folder=str(folder / "run"), processes=0)
    share = config.batch // chip.replicas
    images = np.arange(share * 3072, dtype=np.uint8).reshape(-1, 3, 32, 32)
    stand_in = image_data.ImageSet(images, np.zeros(share, np.int64), tuple("0123456789"), True, "none")
    image_data.load = lambda data: (stand_in, stand_in)
    classification.check_each_seen_once = lambda seen: None     # nothing comes back from a device that is only described
    (folder / "run").mkdir(exist_ok=True)
    flops = train_images.flops_per_image(train_images.ResNet(config, images, 10), images.shape[1:])
    return train_images.train_worker, (config,), dict(tokens_per_step=config.batch, flops_per_token=flops, unit="images",
                                                      micro_batch=share, micro_steps=1)


def classifier_template(settings: dict, chip: Chip, folder: Path):
    """train_classifier's worker on BERT-base's geometry, or a folder's, and tokens without content: one rank's share."""
    import classification
    import numpy as np
    import text_data
    import train_classifier
    from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig
    config = dataclasses.replace(train_classifier.make_config(settings.pop("preset", "bert-base"), **settings), data="none",
                                 epochs=STEPS_SEEN + 1, run_folder=str(folder / "run"), processes=0)
    share = config.batch // chip.replicas
    texts = text_data.TextSet(("",) * share, np.zeros(share, np.int64), ("no", "yes"), "none")
    tokens = train_classifier.Texts.__new__(train_classifier.Texts)
    tokens.arrays = dict(input_ids=np.zeros((share, config.T), np.int32),
                         attention_mask=np.ones((share, config.T), np.int32), labels=texts.labels)
    text_data.load = lambda *which: (texts, texts)
    train_classifier.load_texts = lambda config: (tokens, tokens)
    classification.check_each_seen_once = lambda seen: None     # nothing comes back from a device that is only described
    (folder / "run").mkdir(exist_ok=True)
    train_classifier.register_attention()
    geometry = AutoConfig.from_pretrained(config.model) if Path(config.model).is_dir() else BertConfig()
    model = AutoModelForSequenceClassification.from_config(geometry, attn_implementation=train_classifier.ATTENTION)
    facts = dict(tokens_per_step=config.batch, flops_per_token=train_classifier.flops_per_text(model, config.T),
                 unit="texts", micro_batch=share, micro_steps=1)
    return train_classifier.train_worker, (config, model), facts


# Llama 3.2 1B, as its published config.json has it.
LLAMA_1B = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, tie_word_embeddings=True)


def lora_template(settings: dict, chip: Chip, folder: Path):
    """train_lora's worker on a model without content: Llama 3.2 1B, or the geometry of the folder `model`."""
    import instruction_data
    import numpy as np
    import torch
    import train_lora
    import transformers
    model = settings.pop("model", "")
    geometry = transformers.AutoConfig.from_pretrained(model) if model else transformers.LlamaConfig(**LLAMA_1B)
    geometry.use_cache = False
    config = dataclasses.replace(train_lora.make_config(settings.pop("preset", "llama"), **settings), model="none",
                                 run_folder=str(folder / "run"), eval_examples=1)
    micro_steps = train_lora.count_micro_steps(config, chip.replicas)
    (folder / "run").mkdir(exist_ok=True)

    def load_base(config, dtype, attn_implementation, **_):
        with torch.device("meta"):
            base = transformers.AutoModelForCausalLM.from_config(geometry, attn_implementation=attn_implementation)
        base = base.to(dtype).to_empty(device="cpu")
        base.tie_weights()
        return base

    rows = instruction_data.Rows(np.zeros((config.batch, config.T + 1), np.int32), np.ones((config.batch, config.T),
                                 np.float32), 0)
    train_lora.load_base, train_lora.load_rows = load_base, lambda config: (rows, rows, None)
    size = sum(p.numel() for p in load_base(config, torch.bfloat16, "eager").parameters())
    return train_lora.train_worker, (config, chip.replicas > 1), dict(
        tokens_per_step=config.batch * config.T, flops_per_token=4 * size, micro_batch=config.micro_batch,
        micro_steps=micro_steps, parameters=size)


TEMPLATES = {"gpt": gpt_template, "mlp": mlp_template, "images": images_template, "classifier": classifier_template,
             "lora": lora_template}


def is_divided(template: str, chip: Chip) -> bool:
    """Whether one process drives all chips of the slice (SPMD): one replica in many partitions, not the other way round."""
    return template == "lora" and chip.replicas > 1


def find_template(name: str):
    """A function of this module by its name, or `template` of the Python file `name`."""
    return TEMPLATES[name] if name in TEMPLATES else load_file(name).template


def load_file(path: str):
    """The module in a .py file, which may import those of py/ flat."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module       # its dataclasses look for it there
    specification.loader.exec_module(module)
    return module


# ---- second child: the TPU's compiler --------------------------------------------------------------------------------

COMPILER_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",      # libtpu holds a lock file; two that only compile do not disturb each other
    "TF_CPP_MIN_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}


def compile_programs(request: dict, folder: Path) -> None:
    """Compile the wanted programs of a trace for the chip; one report a program. Runs in a child process.

    Stops at the first that does not fit: it is the answer, and each further one would take minutes.
    """
    chip = CHIPS[request["chip"]]
    compiler = Compiler(chip, request["divided"])
    for name in request["files"]:
        (folder / "now.txt").write_text(request["kinds"][name])
        report = compiler.compile((folder / name).read_bytes(), request["donated"][name], folder / f"{name}.txt")
        if "error" not in report:
            report |= read_program((folder / f"{name}.txt").read_text())
        (folder / f"{name}.json").write_text(json.dumps(report))
        if "error" in report:
            break


class Compiler:
    """libtpu's compiler for a chip that is only described."""

    def __init__(self, chip: Chip, divided: bool = False):
        import numpy as np
        from jax._src.lib import xla_client
        from jax.experimental import topologies
        self.client = xla_client
        bounds = {} if chip.replicas > 1 else dict(chips_per_host_bounds=chip.host_bounds)
        self.devices = tuple(topologies.get_topology_desc(chip.topology, platform="tpu", **bounds).devices[:chip.replicas])
        self.options = xla_client.CompileOptions()
        shape = (1, chip.replicas) if divided else (chip.replicas, 1)
        self.options.num_replicas, self.options.num_partitions = shape
        self.options.executable_build_options.use_spmd_partitioning = divided
        self.options.device_assignment = xla_client.DeviceAssignment.create(
            np.array([d.id for d in self.devices], dtype=np.int32).reshape(shape))

    def compile(self, hlo: bytes, donated: list, text_file: Path) -> dict:
        """Memory of the compiled program, or {'error': the compiler's words}; the scheduled program goes to text_file."""
        mlir = self.client._xla.mlir.xla_computation_to_mlir_module(self.client.XlaComputation(hlo))
        mlir = mlir.decode() if isinstance(mlir, bytes) else mlir
        begun = time.monotonic()
        found = dict(dots=count_dots(mlir))
        try:
            program = self.devices[0].client.compile(mark_donated(mlir, set(donated)).encode(),
                                                     self.client.DeviceList(self.devices), self.options)
        except Exception as error:      # out of memory arrives here, in words
            return found | dict(error=str(error), compile_seconds=time.monotonic() - begun)
        seconds, memory = time.monotonic() - begun, program.get_compiled_memory_stats()
        text_file.write_text(program.hlo_modules()[0].to_string())
        return found | dict(compile_seconds=seconds, arguments=memory.argument_size_in_bytes,
                            outputs=memory.output_size_in_bytes, aliased=memory.alias_size_in_bytes,
                            temporary=memory.temp_size_in_bytes)


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


def count_dots(mlir: str) -> dict:
    """{'bf16 x bf16 -> bf16': how many} of the matrix products, as the template asked for them."""
    counts = defaultdict(int)
    for line in mlir.splitlines():
        if "stablehlo.dot" in line or "mhlo.dot" in line or "stablehlo.convolution" in line:
            left, right, result = re.findall(r"tensor<(?:[0-9]+x)*([a-z0-9]+)>", line.rpartition(" : ")[2])[-3:]
            counts[f"{left} x {right} -> {result}"] += 1
    return dict(counts)


# ---- reading a scheduled program -------------------------------------------------------------------------------------

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
         "u64": 8, "f64": 8}
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](\{[^}]*\})?")


@dataclass
class Instruction:
    name: str
    shape: str
    opcode: str
    rest: str           # operands and everything after them

    @property
    def operands(self) -> list:
        return re.findall(r"%([^\s,()]+)", self.rest.partition("), ")[0])

    @property
    def cycles(self) -> int:
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def called(self, role: str) -> str:
        found = re.search(rf"\b{role}=%([^\s,)]+)", self.rest)
        return found[1] if found else ""


def read_computations(text: str) -> tuple[dict, str]:
    """{name: [Instruction]} of a program's text, and the name of its entry."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" ") and "=" not in line.split("(")[0]:
            words = line.split()
            name = words[words[0] == "ENTRY"].lstrip("%")
            current = computations[name] = []
            entry = name if words[0] == "ENTRY" else entry
        elif current is not None and (match := INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups()))
    return computations, entry


def read_program(text: str) -> dict:
    """Cycles by operation, reductions, kernels and the largest buffers of a scheduled program."""
    computations, entry = read_computations(text)
    operations = defaultdict(lambda: [0, 0])
    reductions, kernels = [], defaultdict(int)
    for instruction, times in executed(computations, entry):
        if instruction.cycles:
            row = operations[operation_label(instruction)]
            row[0] += instruction.cycles * times
            row[1] += times
        if instruction.opcode in ("all-reduce", "all-reduce-start"):
            reductions.append(dict(shape=plain_shape(instruction.shape), bytes=shape_bytes(instruction.shape) * times))
        if instruction.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.rest:
            kernels[module_of(instruction.op_name)] += times
    return dict(cycles=sum(cycles for cycles, _ in operations.values()), reductions=reductions, kernels=dict(kernels),
                operations=[dict(name=name, cycles=cycles, count=count)
                            for name, (cycles, count) in sorted(operations.items(), key=lambda item: -item[1][0])],
                largest=largest_at_peak(computations, entry))


def executed(computations: dict, name: str, times: int = 1):
    """(instruction, how often it runs) of a computation and of the loops and calls in it."""
    for instruction in computations[name]:
        yield instruction, times
        if instruction.opcode == "while":
            yield from executed(computations, instruction.called("body"), times * trip_count(computations, instruction))
        elif instruction.opcode == "call":
            yield from executed(computations, instruction.called("to_apply"), times)
        elif instruction.opcode == "conditional":
            branch = instruction.called("true_computation")
            if branch:
                yield from executed(computations, branch, times)


def trip_count(computations: dict, loop: Instruction) -> int:
    """How often a loop runs that counts from 0 up to a constant. The compiler says it of some; of others the condition does."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    limits = [int(match[1]) for instruction in computations.get(loop.called("condition"), ())
              if instruction.opcode == "constant" and (match := re.match(r"(\d+)\)", instruction.rest))]
    return limits[0] if len(limits) == 1 else 1


def module_of(op_name: str) -> str:
    """'model.blocks.*.attn.c_proj' from torch_xla's 'model.33/blocks.0.4/attn.2/c_proj.5/aten__addmm'."""
    parts = [re.sub(r"\.\d+$", "", part) for part in op_name.split("/")[:-1]]
    parts = [part for part in parts if part != "call" and not re.match(r"(aten|xla|prim)__", part)]    # 'call': a loop's
    if any("(" in part for part in parts):      # from here on a JAX function's own names, one of them very long
        parts = parts[:next(number for number, part in enumerate(parts) if "(" in part)]
    path = ".".join(parts)
    path = path.removesuffix(BACKWARD) + " (backward)" if path.endswith(BACKWARD) else path
    return re.sub(r"\.\d+(?=[. ]|$)", ".*", path)


def operation_label(instruction: Instruction) -> str:
    """Module and operation, as 'model.blocks.*.mlp.c_fc addmm'; layout copies are named as such."""
    if not instruction.op_name:
        return f"(compiler) {instruction.opcode}"
    operation = re.sub(r"^(aten|xla|prim)_+", "", instruction.op_name.split("/")[-1])
    kind = f" [{instruction.opcode}]" if instruction.opcode in ("copy", "reshape", "transpose") else ""
    return f"{module_of(instruction.op_name) or '(no module)'} {operation}{kind}"


def shape_bytes(shape: str, on_chip_too: bool = True) -> int:
    """Bytes of all arrays in a shape; memory space S(1) is on the chip, not in HBM."""
    total = 0
    for kind, dimensions, layout in ARRAY.findall(shape):
        if kind in BYTES and (on_chip_too or "S(1)" not in layout):
            size = BYTES[kind]
            for dimension in filter(None, dimensions.split(",")):
                size *= int(dimension)
            total += size
    return total


def plain_shape(shape: str, on_chip_too: bool = True) -> str:
    """The arrays of a shape without their layouts."""
    return ", ".join(f"{kind}[{dimensions}]" for kind, dimensions, layout in ARRAY.findall(shape)
                     if kind in BYTES and (on_chip_too or "S(1)" not in layout))


NEW_OF_PAIR = {"copy-start": 0, "slice-start": 1}      # shapes (result, source, ...) and ((source), result, ...)
SAME_BUFFER = ("bitcast", "get-tuple-element", "tuple", "copy-done", "slice-done", "async-done", "all-reduce-done",
               "optimization-barrier", "while")


def largest_at_peak(computations: dict, name: str, count: int = 5) -> list:
    """The largest temporary buffers alive at the fullest moment of a schedule, from its shapes; the padding is not known."""
    buffers = alive_at_peak(computations, name)
    return [dict(bytes=size, module=module_of(i.op_name) or "(compiler)", shape=plain_shape(i.shape, on_chip_too=False))
            for i, size in sorted(buffers, key=lambda one: -one[1])[:count]]


def alive_at_peak(computations: dict, name: str, is_body: bool = False) -> list:
    """[(instruction, bytes)] of the fullest moment, with those inside a loop that runs then.

    What a loop carries on lies in the loop's own buffers: the body of one adds nothing for its results.
    """
    schedule, owners, sizes, born, dies, inside = computations[name], {}, {}, {}, {}, {}
    for moment, instruction in enumerate(schedule):
        if instruction.opcode == "while":
            inside[moment] = alive_at_peak(computations, instruction.called("body"), is_body=True)
        if instruction.opcode in SAME_BUFFER:
            owners[instruction.name] = {o for name in instruction.operands for o in owners.get(name, ())}
        else:
            owners[instruction.name] = {instruction.name}
            shape = instruction.shape
            if instruction.opcode in NEW_OF_PAIR:
                shape = [match[0] for match in ARRAY.finditer(shape)][NEW_OF_PAIR[instruction.opcode]]
            held = instruction.opcode not in ("parameter", "constant")
            sizes[instruction.name] = shape_bytes(shape, on_chip_too=False) if held else 0
            born[instruction.name] = dies[instruction.name] = moment
        for name in instruction.operands:
            for owner in owners.get(name, ()):
                dies[owner] = moment
    if is_body:
        sizes |= dict.fromkeys(owners[schedule[-1].name], 0)
    for moment, instruction in enumerate(schedule):     # a result may take over the buffer of an operand that ends there
        for owner in (o for name in instruction.operands for o in owners.get(name, ())):
            if dies[owner] == moment and sizes[owner] == sizes.get(instruction.name) and owner != instruction.name:
                dies[owner] = moment - 1
                break
    change = defaultdict(int)
    for name, size in sizes.items():
        change[born[name]] += size
        change[dies[name] + 1] -= size
    for moment, buffers in inside.items():
        change[moment] += sum(size for _, size in buffers)
        change[moment + 1] -= sum(size for _, size in buffers)
    full, now, peak_moment = 0, 0, 0
    for moment in sorted(change):
        now += change[moment]
        if now > full:
            full, peak_moment = now, moment
    return [(i, sizes[i.name]) for i in schedule if sizes.get(i.name) and born[i.name] <= peak_moment <= dies[i.name]
            ] + inside.get(peak_moment, [])


def read_out_of_memory(error: str) -> dict | None:
    """{'needed_gib', 'largest'} from the compiler's words, None when they are about something else."""
    unit = {"G": GIB, "M": 2 ** 20, "K": 2 ** 10, "": 1}
    alone = re.search(r"Allocation \(size=(\d+)\) would exceed memory .*?shape = '([^']*)'", error)
    if alone:       # a single buffer is larger than the chip, and the compiler looks no further
        return dict(needed_gib=int(alone[1]) / GIB, largest=[
            dict(bytes=int(alone[1]), module="(one buffer alone)", shape=plain_shape(alone[2]))])
    used = re.search(r"Used ([\d.]+)([GM]) of [\d.]+[GM] hbm", error)
    if not used:
        return None
    entries = re.findall(r"Size: ([\d.]+)([GMK]?)\n(?:\s+Operator: op_name=\"([^\"]*)\".*\n)?\s+Shape: (\S+)", error)
    return dict(needed_gib=float(used[1]) * unit[used[2]] / GIB, largest=[
        dict(bytes=int(float(size) * unit[letter]), module=module_of(name) or "(compiler)", shape=plain_shape(shape))
        for size, letter, name, shape in entries[:5]])


# ---- the parent ------------------------------------------------------------------------------------------------------

def check_installed() -> dict:
    """Versions of the compiler's packages. Raises UserError with what to install."""
    versions = {name: rt.installed_version(name) for name in (*REQUIRED, "torch_xla")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        raise UserError(f"preflight needs {', '.join(missing)}, not installed here: pip install {' '.join(pinned())}"
                        " (Linux x86-64; no TPU is needed).")
    return versions


def pinned() -> list:
    """['jax==0.7.1', ...]: the versions that the installed torch_xla names for its own TPU extras."""
    try:
        named = [line.split(";")[0].strip() for line in importlib.metadata.requires("torch_xla") or ()]
    except importlib.metadata.PackageNotFoundError:
        return ["torch_xla", *REQUIRED]
    return [line for line in named if re.split("[=<>~!]", line)[0] in REQUIRED]


def run_child(task: str, request: dict, folder: Path, say) -> None:
    """Run trace or compile_programs in a process of its own; say something every 20 s. Raises UserError when it fails."""
    (folder / "request.json").write_text(json.dumps(request))
    environment = {**os.environ, **(COMPILER_ENVIRONMENT if task == "compile" else {}), **request.get("environment", {})}
    with open(folder / f"{task}.log", "w") as log:
        child = subprocess.Popen([sys.executable, __file__, CHILD, task, str(folder)], env=environment, stdout=log,
                                 stderr=subprocess.STDOUT)
        begun = time.monotonic()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(20)
                    break
                now = folder / "now.txt"
                what = f"compiling the {now.read_text()}" if task == "compile" and now.exists() else f"{task} is under way"
                say(f"  {time.monotonic() - begun:4.0f} s: {what}")
        finally:
            child.kill()
            child.wait()
    failure = folder / "failure.txt"
    if failure.exists():
        raise UserError(failure.read_text())
    if child.returncode == -signal.SIGKILL:
        raise UserError(f"The preflight's {task} was ended by the system, which does so when memory runs out: lower micro_batch or"
                        " the number of layers, or run it on a machine with more memory.")
    if child.returncode:
        tail = (folder / f"{task}.log").read_text()[-1500:]
        raise rt.WorkerFailed(f"{task} of the preflight ended with code {child.returncode}; its last words:\n{tail}")


CHILD = "--child"


def child_main(task: str, folder: str) -> None:
    folder = Path(folder)
    request = json.loads((folder / "request.json").read_text())
    try:
        {"trace": trace, "compile": compile_programs}[task](request, folder)
    except UserError as error:
        (folder / "failure.txt").write_text(str(error))


def preflight(template: str, chip_name: str, settings: dict, say=lambda line: None, evaluation: bool = True,
              names: bool = True, keep: str | Path | None = None) -> dict:
    """Trace a template's worker, compile what it runs for the chip, and return the report that `show` prints.

    settings: what the template's config takes, and for 'gpt' also 'preset'. keep: a folder for the programs' text.
    Raises UserError for wrong settings and where the compiler is not installed. Running out of memory is a report.
    """
    versions, chip = check_installed(), CHIPS[chip_name]
    with tempfile.TemporaryDirectory(prefix="preflight_") as scratch:
        folder = Path(keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        say(f"preflight: tracing {template} {settings} for {chip_name}")
        run_child("trace", dict(template=template, chip=chip_name, settings=settings, names=names), folder, say)
        traced = json.loads((folder / "programs.json").read_text())
        wanted = [p for p in traced["programs"] if p["per_step"] or evaluation and p["kind"] == "evaluation"]
        wanted.sort(key=lambda p: p["kind"] != "optimizer step")    # the fullest first
        say(f"preflight: {len(wanted)} programs go to the TPU compiler, each takes up to several minutes")
        request = dict(chip=chip_name, divided=is_divided(template, chip), files=[p["file"] for p in wanted], kinds={p["file"]: p["kind"] for p in wanted},
                       donated={p["file"]: p["donated"] for p in wanted},
                       environment=dict(LIBTPU_INIT_ARGS=traced["flags"], TPU_ACCELERATOR_TYPE=chip.accelerator))
        run_child("compile", request, folder, say)
        for program in wanted:
            result = folder / f"{program['file']}.json"
            program["compiled"] = json.loads(result.read_text()) if result.exists() else None
    return summarise(template, chip, settings, versions, traced, wanted)


def summarise(template: str, chip: Chip, settings: dict, versions: dict, traced: dict, programs: list) -> dict:
    facts = traced["facts"]
    reports = [describe_program(chip, p, p["compiled"]) for p in programs if p["compiled"]]
    failed = next((r for r in reports if r.get("error")), None)
    if failed and failed["peak_gib"] is None:
        raise UserError(f"The TPU compiler refused the {failed['kind']}: {failed['error'][:600]}")
    fits = all(r["peak_gib"] + r["resident_gib"] <= chip.memory_gib for r in reports) and not failed
    report = dict(
        what="an estimate by the TPU compiler, not a measurement", template=template, settings=settings, chip=chip.name,
        versions=versions, facts=facts, fits=fits, memory_limit_gib=chip.memory_gib,
        peak_gib=max(r["peak_gib"] + r["resident_gib"] for r in reports), programs=reports,
        programs_left_out=[p["kind"] for p in programs if not p["compiled"]],
        training_programs=sum(p["kind"] in TRAINING for p in traced["programs"]),
        dtypes=merged_dtypes([p for p in traced["programs"] if p["kind"] in TRAINING]))
    if not failed:
        report |= estimate(chip, facts, reports)
    return report


TRAINING = ("micro-step", "optimizer step")


def describe_program(chip: Chip, program: dict, compiled: dict) -> dict:
    """One compiled program in the units of the report."""
    row = dict(kind=program["kind"], per_step=program["per_step"], resident_gib=program["resident_bytes"] / GIB,
               compile_seconds=round(compiled["compile_seconds"], 1), dots=compiled["dots"])
    if "error" in compiled:
        memory = read_out_of_memory(compiled["error"])
        return row | dict(error=compiled["error"], peak_gib=memory and memory["needed_gib"],
                          largest=memory["largest"] if memory else [])
    peak = compiled["arguments"] + compiled["outputs"] - compiled["aliased"] + compiled["temporary"]
    return row | dict(peak_gib=peak / GIB, **{f"{name}_gib": compiled[name] / GIB for name in
                                              ("arguments", "outputs", "aliased", "temporary")},
                      cycles=compiled["cycles"], milliseconds=compiled["cycles"] / chip.clock * 1e3,
                      reductions=compiled["reductions"], kernels=compiled["kernels"], largest=compiled["largest"],
                      operations=compiled["operations"])


def merged_dtypes(programs: list) -> dict:
    """{'parameters': {'float32': bytes}, ...} over the programs of the training."""
    merged = {}
    for program in programs:
        for role, row in program["dtypes"].items():
            merged.setdefault(role, {}).update(row)
    return merged


def estimate(chip: Chip, facts: dict, reports: list) -> dict:
    """Time and speed of an optimizer step from its programs."""
    training = [r for r in reports if r["per_step"]]
    computing = sum(r["milliseconds"] * r["per_step"] for r in training)
    reduced = sum(reduction["bytes"] * r["per_step"] for r in training for reduction in r["reductions"])
    reducing = all_reduce_milliseconds(chip, reduced)
    kernel = kernel_milliseconds(chip, facts) if any(r["kernels"] for r in training) else 0.0
    step = computing + reducing + kernel
    tokens_per_second = facts["tokens_per_step"] / step * 1e3
    operations = defaultdict(lambda: [0.0, 0])
    for r in training:
        for operation in r["operations"]:
            row = operations[operation["name"]]
            row[0] += operation["cycles"] * r["per_step"] / chip.clock * 1e3
            row[1] += operation["count"] * r["per_step"]
    return dict(
        step_ms=step, computing_ms=computing, reducing_ms=reducing, kernel_ms=kernel, tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * facts["flops_per_token"] / (chip.peak_flops * chip.replicas),
        reductions=sum(len(r["reductions"]) * r["per_step"] for r in training), reduced_bytes=reduced,
        operations=[dict(name=name, milliseconds=ms, count=count)
                    for name, (ms, count) in sorted(operations.items(), key=lambda item: -item[1][0])[:10]])


KERNEL_EFFICIENCY = 0.6      # of the peak with heads of 128, in the blocks that are computed: an assumption about
#                              splash attention, stated where it is used


def kernel_milliseconds(chip: Chip, facts: dict) -> float:
    """Time of the attention kernels of a step, on which the compiler has no opinion, from their flops.

    Of the 4 T C flops a token and layer forward, and 2.5 times as many backward where the scores are computed again, the
    kernels do those of the blocks that the causal mask does not leave out. Narrower heads leave a part of the 128 wide
    matrix unit empty.
    """
    import tpu_attention
    head_size = facts["n_embd"] // facts["n_head"]
    forward, backward = tpu_attention.blocks_computed(facts["T"])
    per_token = 4 * (forward + 2.5 * backward) * facts["n_layer"] * facts["n_embd"] * facts["T"]
    used = KERNEL_EFFICIENCY * min(1.0, head_size / 128)
    return per_token * facts["tokens_per_step"] / chip.replicas / (chip.peak_flops * used) * 1e3


def all_reduce_milliseconds(chip: Chip, size: int) -> float:
    """A ring moves 2 (n-1)/n of the bytes through each chip, half of them each way."""
    return 2 * (chip.replicas - 1) / chip.replicas * size / (2 * chip.link_bytes) * 1e3


def show(report: dict) -> str:
    """The report as one readable table."""
    chip, facts = CHIPS[report["chip"]], report["facts"]
    settings = " ".join(f"{name}={value}" for name, value in report["settings"].items())
    lines = [f"{report['template']} {settings} on {chip.name}, libtpu {report['versions']['libtpu']}: {report['what']}",
             f"  batch    {facts['tokens_per_step']:,} a step = {facts['micro_batch']} x {facts['micro_steps']} micro-steps x"
             f" {chip.replicas} replica{'s' * (chip.replicas > 1)}",
             f"  memory   {'fits' if report['fits'] else 'DOES NOT FIT'}: {size_text(report['peak_gib'] * GIB)} of"
             f" {chip.memory_gib} GiB"]
    return "\n".join([*lines, *show_speed(report, chip), *show_programs(report), *show_dtypes(report), *show_operations(report)])


def show_speed(report: dict, chip: Chip) -> list:
    if "step_ms" not in report:
        return []
    unit = report["facts"].get("unit", "tokens")
    lines = [f"  speed    {report['tokens_per_second']:,.0f} {unit}/s, {report['step_ms']:,.1f} ms a step, MFU {report['mfu']:.1%}"
             f" of {chip.peak_flops / 1e12:.0f} TFLOP/s a chip",
             f"  reduced  {report['reductions']} reduction{'s' * (report['reductions'] != 1)} of together"
             f" {size_text(report['reduced_bytes'])} a step, counted as {report['reducing_ms']:.1f} ms of it at"
             f" {chip.link_bytes / 1e9:.0f} GB/s a link and way"]
    if is_divided(report["template"], chip):
        lines.append("  gathers  of the divided weights are not in these times: the compiler does not time them")
    if report["kernel_ms"]:
        lines.append(f"  kernels  {report['kernel_ms']:.1f} ms of it in attention kernels, which the compiler does not time:"
                     f" the flops of the blocks they compute at {KERNEL_EFFICIENCY:.0%} of the peak, less for heads narrower"
                     " than 128")
    return lines


def show_programs(report: dict) -> list:
    lines = ["", "  program         a step       peak  held besides   estimated  compiled in"]
    for r in report["programs"]:
        time_text = f"{r['milliseconds']:8.1f} ms" if "milliseconds" in r else "          -"
        lines.append(f"  {r['kind']:15} {r['per_step'] or '-':>6} {size_text(r['peak_gib'] * GIB):>10}"
                     f" {size_text(r['resident_gib'] * GIB):>13} {time_text:>11} {r['compile_seconds']:9.0f} s")
    if report["programs_left_out"]:
        lines.append(f"  not compiled after that: {', '.join(report['programs_left_out'])}")
    fullest = max(report["programs"], key=lambda r: r["peak_gib"] + r["resident_gib"])
    lines += ["", f"  the largest buffers when the {fullest['kind']} is fullest"]
    return lines + [f"  {size_text(b['bytes']):>10}  {b['module']}: {b['shape']}" for b in fullest["largest"]]


def show_dtypes(report: dict) -> list:
    lines = ["", "  what is held     in which dtype"]
    lines += [f"  {role:16} " + ", ".join(f"{name} {size_text(held)}" for name, held in row.items())
              for role, row in report["dtypes"].items()]
    lines += [f"  {'products':16} {r['kind']}: " + ", ".join(f"{count} {name}" for name, count in r["dots"].items())
              for r in report["programs"] if r["dots"]]
    lines += [f"  {'reductions':16} {r['kind']}: " + "; ".join(one["shape"] for one in r["reductions"])
              for r in report["programs"] if r.get("reductions")]
    return lines


def show_operations(report: dict) -> list:
    if "operations" not in report:
        return []
    return ["", "  the most expensive operations of a step, by module (* is every block)"] + [
        f"  {o['milliseconds']:8.1f} ms {o['milliseconds'] / report['step_ms']:6.1%}  {o['name']} (x {o['count']})"
        for o in report["operations"]]


def size_text(size: float) -> str:
    """'1.50 GiB', '12.3 MiB', '0.5 KiB'."""
    for unit, name, digits in ((GIB, "GiB", 2), (2 ** 20, "MiB", 1)):
        if size >= 0.1 * unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size / 1024:,.1f} KiB" if size else "-"


def search_micro_batch(settings: dict, chip: Chip, say) -> dict:
    """The report of the largest micro_batch that fits, or of 1 when none does."""
    import train_gpt
    preset = settings.get("preset", "gpt2-124m")
    config = train_gpt.make_config(preset, **{k: v for k, v in settings.items() if k not in ("preset", "micro_batch")})
    windows = config.global_batch // chip.replicas
    sizes = [n for n in range(1, windows + 1) if config.global_batch % (n * chip.replicas) == 0]
    if not sizes:
        raise UserError(f"tokens_per_step={config.tokens_per_step} is {config.global_batch} windows of T={config.T}, which"
                        f" {chip.replicas} replicas cannot share equally at any micro_batch: use a multiple of"
                        f" {config.T * chip.replicas}.")
    best, low, high = None, 0, len(sizes) - 1
    while low <= high:
        middle = (low + high + 1) // 2
        report = preflight("gpt", chip.name, {**settings, "micro_batch": sizes[middle]}, say, evaluation=False)
        say(f"preflight: micro_batch {sizes[middle]} {'fits' if report['fits'] else 'does not fit'}"
            f" ({report['peak_gib']:.2f} GiB)")
        if report["fits"] or middle == 0:
            best = report
        low, high = (middle + 1, high) if report["fits"] else (low, middle - 1)
    return best


def parse_arguments(arguments: list | None):
    """Own options, and the template's settings as a dict. Raises UserError for what is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--template", default="gpt", help=f"{', '.join(TEMPLATES)} or a .py file; default gpt")
    parser.add_argument("--chip", default="v5e-8", help=f"{', '.join(CHIPS)}; default v5e-8")
    parser.add_argument("--search", action="store_true", help="find the largest micro_batch that fits")
    parser.add_argument("--json", metavar="FILE", help="write the whole report there too")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the compiled programs' text there")
    own, rest = parser.parse_known_args(arguments)
    if own.chip not in CHIPS:
        raise UserError(f"chip={own.chip!r} is not known: use {', '.join(CHIPS)}.")
    if own.template not in TEMPLATES and not (own.template.endswith(".py") and Path(own.template).is_file()):
        raise UserError(f"template={own.template!r} is not known: use {', '.join(TEMPLATES)}, or a .py file with a Config and a"
                        " template(settings, chip, folder), as bench/guides_recipe.py has them.")
    if own.search and own.template != "gpt":
        raise UserError("--search varies micro_batch, which only the gpt template has: leave one of the two out.")
    return own, template_settings(own.template, rest)


def template_settings(template: str, words: list) -> dict:
    """The template's own settings from the rest of the command line."""
    import train_gpt
    if template == "gpt":
        settings = train_gpt.settings_from_command_line(words)
        return {**settings, "preset": "gpt2-124m" if settings.get("preset", "auto") == "auto" else settings["preset"]}
    if template in ("images", "classifier"):
        import train_classifier
        import train_images
        from settings import settings_from_command_line
        kind, presets, default = ((train_images.ImageConfig, train_images.PRESETS, "resnet18") if template == "images" else
                                  (train_classifier.ClassifierConfig, train_classifier.PRESETS, "bert-base"))
        settings = settings_from_command_line(kind, presets, __doc__, words)
        return {**settings, "preset": default if settings.get("preset", "auto") == "auto" else settings["preset"]}
    if template == "lora":
        import train_lora
        from settings import settings_from_command_line
        settings = settings_from_command_line(train_lora.LoraRun, train_lora.PRESETS, train_lora.__doc__, words)
        return {**settings, "preset": "llama" if settings.get("preset", "auto") == "auto" else settings["preset"]}
    import train_mlp
    config = train_mlp.MLPConfig if template == "mlp" else load_file(template).Config
    fields = {f.name: type(f.default) for f in dataclasses.fields(config)}
    parser = argparse.ArgumentParser()
    for name, kind in fields.items():
        parser.add_argument(f"--{name}", type=kind, default=None)
    known, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(f"argument {unknown[0]!r} is not known: the settings of {template} are {', '.join(fields)}.")
    return {name: value for name, value in vars(known).items() if value is not None}


def say_at_once(line: str) -> None:
    print(line, flush=True)


def main(arguments: list | None = None) -> None:
    own, settings = parse_arguments(arguments)
    if own.search:
        report = search_micro_batch(settings, CHIPS[own.chip], say_at_once)
    else:
        report = preflight(own.template, own.chip, settings, say_at_once, keep=own.keep)
    print(show(report))
    if own.json:
        Path(own.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        child_main(*sys.argv[2:])
    else:
        rt.run_main(main)
