"""Fine-tune a Llama-class model with LoRA: on a TPU one process drives all chips, the frozen weights divided over them.

    python py/train_lora.py --preset demo --platform cpu        # a small Llama, built on the spot, no network
    python py/train_lora.py --model /kaggle/input/llama-3.2-1b --examples my_examples.jsonl

or, from a notebook:  train_lora.launch(train_lora.make_config(model="..."), platform)

The base model is frozen, in the dtype that matrices are multiplied in; adapters and optimizer state are fp32 and on
every device, so a checkpoint is a few MB. The run folder gets log.jsonl, curve.png, checkpoints of the adapters, the
adapter for `peft` and the merged model for `transformers`.

The division is FSDPv2's, marked tensor by tensor. torch_xla's wrapper around the whole model divides the adapters too, and
with it the partitioner reports "involuntary full rematerialization" of activations; marked here, it reports none.
"""
import dataclasses
import functools
import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import torch
from torch.nn import functional as F

import checkpoint as ckpt
import instruction_data
import settings as st
import telemetry
from optimizer import adamw, set_learning_rate, warmup_cosine
from runtime import UserError
from settings import require
from token_data import window_order


@dataclass(frozen=True)
class LoraRun:
    """Every setting of a run. The defaults suit Llama 3.2 1B on a TPU v5e-8."""
    model: str = ""                     # a folder, or a name on the Hugging Face Hub; "": a small Llama, built here
    examples: str = "stdlib"            # a .jsonl file of {"prompt", "response"}; stdlib: what Python's functions do
    run_folder: str = "runs/lora"       # an existing run is never overwritten
    resume_from: str = ""               # the run folder of a run to continue; the other settings must be the same

    # the adapters
    rank: int = 16
    alpha: int = 32                     # the adapters' output is scaled by alpha / rank
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"    # the layers that get one

    # the batch
    T: int = 512                        # tokens in a row: prompt, answer and filling
    batch: int = 64                     # examples per optimizer step, over all devices and micro-steps
    micro_batch: int = 4                # examples that one device takes at a time; micro-steps follow from it

    # the optimizer
    max_steps: int = 300
    learning_rate: float = 2e-4         # the peak, after warm-up
    warmup_steps: int = 20
    clip_norm: float = 1.0
    recompute: bool = True              # recompute layers in the backward pass: much less memory, a third more work
    seed: int = 1337

    # what is looked at, and when (in optimizer steps)
    log_every: int = 5
    eval_every: int = 50
    eval_examples: int = 128            # fixed validation examples, the same at every evaluation
    save_every: int = 100
    keep_checkpoints: int = 2
    sample_tokens: int = 48             # length of each of the two answers shown at the end; 0: none

    # where it runs
    platform: str = "auto"              # auto, tpu, gpu, cpu, xla-cpu, virtual-tpu
    precision: str = "auto"             # auto: bf16 on TPU and recent GPUs, fp16 on a T4, fp32 on a CPU

    def __post_init__(self):
        st.check_types(self)
        st.check_ranges(self, {1: ("rank", "alpha", "T", "batch", "micro_batch", "max_steps", "log_every", "eval_every",
                                   "eval_examples", "save_every"),
                               0: ("warmup_steps", "seed", "sample_tokens"), 2: ("keep_checkpoints",)})
        require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be above 0.")
        require(self.clip_norm > 0, f"clip_norm={self.clip_norm} must be above 0.")

    @property
    def base(self) -> str:
        """Where the base model is loaded from."""
        return self.model or str(Path(self.run_folder) / "base")


PRESETS = {
    "llama": {},
    # A few minutes on two CPU cores.
    "demo": dict(T=128, batch=16, micro_batch=2, max_steps=120, learning_rate=1e-2, warmup_steps=10, rank=8, alpha=16,
                 eval_every=40, save_every=60),
    # For tests: seconds.
    "tiny": dict(T=64, batch=16, micro_batch=2, max_steps=6, learning_rate=1e-2, warmup_steps=2, rank=4, alpha=8,
                 log_every=1, eval_every=3, eval_examples=16, save_every=3, sample_tokens=4),
}

# The small Llama of an offline run: grouped-query attention and a tied head, as Llama 3.2 1B has. It is
# pretrained for a few seconds on source code, since adapters of a model that knows nothing could learn next to nothing.
SMALL_LLAMA = dict(vocab_size=1024, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
                   eos_token_id=0, pad_token_id=0)
SMALL_TEXT, SMALL_STEPS, SMALL_BATCH, SMALL_T, SMALL_RATE = 1_000_000, 250, 16, 64, 5e-3


def make_config(preset: str = "auto", **settings) -> LoraRun:
    """A LoraRun from a preset and settings that replace parts of it; 'auto' is llama with a model given, else demo."""
    if preset == "auto":
        preset = "llama" if settings.get("model") else "demo"
    return st.make_config(LoraRun, PRESETS, preset, settings)


def count_micro_steps(config: LoraRun, devices: int) -> int:
    at_once = config.micro_batch * devices
    require(config.batch % at_once == 0, f"batch={config.batch} cannot be shared equally by {devices} devices that take"
            f" micro_batch={config.micro_batch} at a time: use {st.nearest_multiples(config.batch, at_once)}.")
    return config.batch // at_once


# ---- model -----------------------------------------------------------------------------------------------------------

def build_small_base(folder: str | Path, seed: int) -> None:
    """Write a small Llama as a Hub folder: pretrained on the source of Python's library, with its own tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM
    text = "".join(source for _, source in instruction_data.library_source())[:SMALL_TEXT]
    tokenizer = train_tokenizer(text)
    tokenizer.save_pretrained(folder)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    torch.manual_seed(rt.mix_seed(seed))
    model = LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=SMALL_RATE)
    for step in range(SMALL_STEPS):
        starts = torch.randint(len(tokens) - SMALL_T, (SMALL_BATCH, 1))
        optimizer.param_groups[0]["lr"] = warmup_cosine(step, SMALL_RATE, 10, SMALL_STEPS, 0.1)
        x = tokens[starts + torch.arange(SMALL_T)]
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"built {folder}: a Llama of {model.num_parameters():,} parameters, pretrained for {SMALL_STEPS} steps on Python"
          f" source to a loss of {loss.item():.2f}", flush=True)
    model.save_pretrained(folder)


def train_tokenizer(text: str):
    """A byte-level tokenizer learned from the text, as `transformers` keeps it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainers.BpeTrainer(
        vocab_size=SMALL_LLAMA["vocab_size"], special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")


def load_base(config: LoraRun, dtype, **options):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(config.base, dtype=dtype, **options)


def load_tokenizer(config: LoraRun):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(config.base)


def with_adapters(config: LoraRun, base):
    """The base, frozen, with new fp32 adapters, a function of the seed: their second matrix is zero, nothing changes."""
    import peft
    torch.manual_seed(rt.mix_seed(config.seed, 1))
    with warnings.catch_warnings():     # peft reads a name that transformers will drop one day
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(base, peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, task_type="CAUSAL_LM",
                                                         target_modules=config.targets.split(",")))


def adapters(model) -> dict:
    """{name: parameter} of what is trained, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def recompute_layers(model, checkpoint) -> None:
    """Let every layer keep its input alone and compute the rest again in the backward pass.

    `transformers` offers this too, but only with torch's own function, which saves nothing on XLA.
    """
    model.enable_input_require_grads()      # a frozen embedding's output would cut the layers off from the loss
    for layer in model.get_base_model().model.layers:
        layer.forward = functools.partial(_recomputed, layer.forward, checkpoint)


def _recomputed(forward, checkpoint, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(functools.partial(forward, **kwargs), *args)


def set_up(config: LoraRun, runtime: rt.Runtime, mesh: rt.Mesh, resumed=None):
    """(model, optimizer, adapters) on the device: the frozen weights divided over its parts, the rest on each of them."""
    model = with_adapters(config, load_base(config, runtime.compute_dtype, use_cache=False,
                                            attn_implementation="eager" if runtime.is_xla else "sdpa"))
    if resumed:
        load_adapters(model, resumed.model())
    if config.recompute:
        recompute_layers(model, runtime.checkpoint_function())
    model.to(runtime.device).train()
    model.tie_weights()                     # XLA made two tensors of one
    mesh.shard_weights(p for p in model.parameters() if not p.requires_grad)
    mesh.shard_outputs(m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding)))
    runtime.sync()
    trained = torch.nn.ParameterDict({name.replace(".", "/"): p for name, p in adapters(model).items()})
    optimizer = adamw(trained.values(), runtime.is_xla, weight_decay=0.0)
    ckpt.load_optimizer(optimizer, trained, resumed.optimizer() if resumed else None)
    if runtime.is_xla:
        for state in optimizer.state.values():      # equal numbers share one buffer on XLA, but only until step one
            state["step"] = state["step"] + 0
    for tensor in (*trained.values(), *(value for state in optimizer.state.values() for value in state.values())):
        mesh.shard(tensor, None)
    begin_gradients(trained.values(), runtime)
    runtime.sync()
    return model, optimizer, trained


def begin_gradients(parameters, runtime: rt.Runtime) -> None:
    """Zeros on XLA, so that the first micro-step of a step is the same program as the others."""
    if runtime.is_xla:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)


def load_adapters(model, tensors: dict) -> None:
    own = adapters(model)
    require(own.keys() == {name.replace("/", ".") for name in tensors}, "The checkpoint's adapters are not those of"
            " this configuration: use the rank, targets and model that it was saved with.")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name.replace("/", ".")].copy_(tensor)


# ---- the worker ------------------------------------------------------------------------------------------------------

def batch_at(rows: instruction_data.Rows, indices, runtime: rt.Runtime, mesh: rt.Mesh, weights=None) -> list:
    """x, y (B, T) int64 and which tokens are learned (B, T) on the device, each device holding its rows alone."""
    learned = rows.learned[indices] if weights is None else rows.learned[indices] * weights[:, None]
    tokens = torch.from_numpy(rows.tokens[indices]).long()
    return [mesh.shard(part.contiguous().to(runtime.device)) for part in
            (tokens[:, :-1], tokens[:, 1:], torch.from_numpy(learned))]


def answer_loss(model, runtime: rt.Runtime, x, y, learned):
    """The sum of the answers' losses, in nats, a 0-d tensor; a function of its own, so that no logits outlive it."""
    with runtime.autocast():
        logits = model(input_ids=x).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
    return (losses * learned.flatten()).sum()


@torch.no_grad()
def evaluate(model, runtime: rt.Runtime, mesh: rt.Mesh, rows: instruction_data.Rows, config: LoraRun) -> float:
    """Mean loss in nats per answer token over the first `eval_examples`, each counted once; batches of one shape."""
    model.eval()
    count, at_once = min(config.eval_examples, len(rows.tokens)), config.micro_batch * mesh.devices
    mine = at_once * runtime.world_size
    total = runtime.number(0.0)
    for first in range(0, count, mine):
        numbers = first + runtime.rank * at_once + torch.arange(at_once).numpy()
        batch = batch_at(rows, numbers.clip(max=count - 1), runtime, mesh, (numbers < count).astype("float32"))
        total = total + answer_loss(model, runtime, *batch)
        runtime.sync()
    model.train()
    return runtime.host_values(runtime.all_reduce(total, "sum"))[0] / float(rows.learned[:count].sum())


def train_worker(config: LoraRun, sharded: bool = False, processes: int = 0) -> None:
    """Train the adapters up to config.max_steps on this rank. sharded: this process drives all chips of a TPU."""
    mesh = rt.Mesh(sharded)
    runtime = rt.Runtime(config.precision, processes)
    train, val, tokenizer = load_rows(config)
    micro_steps = count_micro_steps(config, runtime.world_size * mesh.devices)
    resumed = ckpt.find_newest(config.resume_from) if config.resume_from else None
    model, optimizer, trained = set_up(config, runtime, mesh, resumed)
    first = step = resumed.step if resumed else 0
    describe(config, runtime, mesh, model, trained, train, micro_steps)
    log = telemetry.RunLog(config.run_folder, runtime.is_main, first)
    speed = telemetry.Throughput(config.batch * config.T, 0.0, None)
    at_once = config.micro_batch * mesh.devices

    with telemetry.Heartbeat(runtime.is_main) as heartbeat, log:
        while True:
            if (step % config.eval_every == 0 or step == config.max_steps) and (step > first or not resumed):
                heartbeat.report("evaluating")
                val_loss = evaluate(model, runtime, mesh, val, config)
                log.write(step=step, val_loss=val_loss)
                runtime.print(f"step {step}  validation loss {val_loss:.4f} per token of the answers")
            if step > first and (step % config.save_every == 0 or step == config.max_steps):
                heartbeat.report("saving")
                save(config, runtime, trained, optimizer, step)
            if step == config.max_steps:
                break
            speed.start(step)

            heartbeat.report(f"step {step + 1}" + (", the first of this run, is compiled" if step == first else ""))
            set_learning_rate(optimizer, learning_rate(config, step), runtime.device)
            order = window_order(config.seed, step * config.batch, config.batch, len(train.tokens))
            tokens_learned = float(train.learned[order].sum())      # of the whole batch: one mean over all its answers
            loss_sum = runtime.number(0.0)
            for micro_step in range(micro_steps):
                row = (micro_step * runtime.world_size + runtime.rank) * at_once
                batch = batch_at(train, order[row:row + at_once], runtime, mesh)
                # The ranks' gradients are averaged, not summed.
                scale = runtime.number(runtime.world_size / tokens_learned)
                loss = answer_loss(model, runtime, *batch) * scale
                runtime.scaler.scale(loss.sum()).backward()
                loss_sum = loss_sum + loss.detach()
                runtime.sync()
            norm = runtime.optimizer_step(optimizer, config.clip_norm)
            begin_gradients(trained.values(), runtime)
            runtime.sync()
            step += 1

            if step % config.log_every == 0 or step in (first + 1, config.max_steps):
                loss, grad_norm = runtime.host_values(runtime.all_reduce(torch.cat([loss_sum, norm.view(1)])))
                record = dict(step=step, loss=loss, lr=learning_rate(config, step - 1), grad_norm=grad_norm,
                              **speed.read(step, config.max_steps), compiles=runtime.compile_count())
                log.write(**record)
                runtime.print(telemetry.progress_line(record, config.max_steps))
                require(math.isfinite(loss), f"The loss is {loss} at step {step}: lower learning_rate.")
    runtime.barrier()       # until the last checkpoint is written


def learning_rate(config: LoraRun, step: int) -> float:
    return warmup_cosine(step, config.learning_rate, config.warmup_steps, config.max_steps, 0.1)


def load_rows(config: LoraRun):
    """(training rows, validation rows, tokenizer)"""
    tokenizer = load_tokenizer(config)
    train, val = instruction_data.read_examples(config.examples)
    return *(instruction_data.encode(examples, tokenizer, config.T) for examples in (train, val)), tokenizer


def describe(config: LoraRun, runtime: rt.Runtime, mesh: rt.Mesh, model, trained, rows, micro_steps: int) -> None:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    dtypes = {str(p.dtype).removeprefix("torch.") for p in frozen}
    devices = f"{mesh.devices} device{'s' if mesh.devices > 1 else ''}"
    processes = f"{runtime.world_size} process{'es' if runtime.world_size > 1 else ''}"
    runtime.print(
        f"base: {sum(p.numel() for p in frozen):,} parameters, frozen, {'/'.join(dtypes)}, divided over {devices} of each"
        f" of {processes}\n"
        f"adapters: {sum(p.numel() for p in trained.values()):,} parameters, float32, on every device; matrix work"
        f" {runtime.precision}; recompute {'on' if config.recompute else 'off'}\n"
        f"batch: {config.batch} examples = {config.micro_batch} x {micro_steps} micro-steps x"
        f" {runtime.world_size * mesh.devices} devices, T={config.T}\n"
        f"data: {len(rows.tokens):,} training examples, a pass every {len(rows.tokens) / config.batch:.0f} steps;"
        f" {rows.cut} are longer than T and cut")


def save(config: LoraRun, runtime: rt.Runtime, trained, optimizer, step: int) -> None:
    """A checkpoint of the adapters and their optimizer: a few MB, so written at once."""
    tensors, state = ckpt.model_tensors(trained), ckpt.optimizer_tensors(optimizer, trained)
    if runtime.is_main:
        ckpt.save(config.run_folder, ckpt.step_folder(step), step, tensors, state,
                  dict(config=dataclasses.asdict(config)))
        ckpt.remove_old(config.run_folder, config.keep_checkpoints)
        telemetry.draw_curve(config.run_folder)


# ---- the parent ------------------------------------------------------------------------------------------------------

def launch(config: LoraRun, platform: rt.Platform | None = None) -> Path:
    """Check everything, train, write the adapter and the merged model, show two answers. Returns the run folder."""
    platform = platform or rt.patch_environment(config.platform)
    check_packages()
    sharded = platform.uses_xla and platform.processes > 1
    if platform.name == "virtual-tpu":
        print(f"REHEARSAL on {platform.processes} virtual TPU devices of this CPU, driven by one process: its speed says"
              " nothing.")
    count_micro_steps(config, platform.processes)
    instruction_data.read_examples(config.examples)
    if config.model:
        check_model(config)
    run_folder = config.resume_from or str(ckpt.unused_run_folder(config.run_folder))
    config = dataclasses.replace(config, run_folder=run_folder)
    if config.resume_from:
        check_same_run(config)
    folder = Path(config.run_folder)
    is_main = rt.outer_launch()[1] == 0
    quiet_transformers()
    with ckpt.only_run_in(folder):
        if is_main and not config.model and not (folder / "base").exists():
            rt.launch(build_small_base, (folder / "base", config.seed), rt.Platform("cpu", 1, "pretraining"))
        if is_main:
            (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        # SPMD: one process, this one, drives all chips. Elsewhere a process a device.
        rt.launch(train_worker, (config, sharded, 0 if sharded else platform.processes),
                  dataclasses.replace(platform, processes=1) if sharded else platform)
        rt.launch(write_results, (config,), rt.Platform("cpu", 1, "merging"))
    print(f"run folder: {config.run_folder}\n  merged model for transformers: merged, adapter for peft: adapter, curve"
          f" {telemetry.CURVE_NAME}, log {telemetry.LOG_NAME}")
    return folder


def check_packages() -> None:
    missing = [name for name in ("transformers", "peft") if rt.installed_version(name) is None]
    require(not missing, f"{' and '.join(missing)} must be installed for fine-tuning: pip install --no-deps"
            f" {' '.join(missing)}.")


def check_model(config: LoraRun) -> None:
    """Raise UserError unless `transformers` finds the model's configuration, and it is a Llama's."""
    from transformers import AutoConfig
    is_path = config.model.count("/") != 1 or config.model.startswith((".", "/", "~"))
    require(not is_path or Path(config.model, "config.json").is_file(),
            f"model={config.model!r} is not the folder of a model: it has no config.json.")
    try:
        found = AutoConfig.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise UserError(f"model={config.model!r} is neither a folder of a model nor a name that the Hugging Face Hub"
                        f" gives ({str(error).splitlines()[0]})") from None
    require(found.model_type == "llama", f"model={config.model!r} is a {found.model_type!r}: this template fine-tunes"
            " models of the Llama architecture.")


def quiet_transformers() -> None:
    """No progress bars for what takes a second; they would be a line each in a notebook that nobody watches."""
    import transformers
    transformers.utils.logging.disable_progress_bar()


def check_same_run(config: LoraRun) -> None:
    """Raise UserError unless the run to continue has a checkpoint and was made with these settings."""
    newest = ckpt.find_newest(config.resume_from)
    require(newest is not None, f"{config.resume_from} holds no usable checkpoint of adapters to resume from.")
    free = ("run_folder", "resume_from", "platform", "precision", "log_every", "eval_every", "save_every",
            "keep_checkpoints", "sample_tokens", "micro_batch", "recompute")
    saved, now = newest.state()["config"], dataclasses.asdict(config)
    wrong = [f"{name} ({saved[name]!r} -> {value!r})" for name, value in now.items()
             if name not in free and saved[name] != value]
    require(not wrong, f"A resumed run cannot change {', '.join(wrong)}: start a new run for it.")


def write_results(config: LoraRun) -> None:
    """The newest adapters as a `peft` folder, merged into the base for `transformers`, and two answers; on the CPU."""
    torch.set_num_threads(min(16, rt.available_cores()))
    folder = Path(config.run_folder)
    base = load_base(config, torch.float32)
    own_dtype = getattr(torch, str(base.config.dtype or "float32").removeprefix("torch."))
    model, tokenizer = with_adapters(config, base), load_tokenizer(config)
    load_adapters(model, ckpt.find_newest(folder).model())
    model.save_pretrained(folder / "adapter")
    merged = model.merge_and_unload()
    merged.to(own_dtype).save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    for example in instruction_data.read_examples(config.examples)[1][:2 if config.sample_tokens else 0]:
        prompt = instruction_data.prompt_text(example.prompt, tokenizer)
        tokens = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        longer = merged.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                                 max_new_tokens=config.sample_tokens, pad_token_id=tokenizer.eos_token_id)
        answer = tokenizer.decode(longer[0, tokens.shape[1]:], skip_special_tokens=True)
        print(f"--- {example.prompt}\n    answer: {answer}\n    documentation: {example.response}")


def main(arguments: list | None = None) -> None:
    settings = st.settings_from_command_line(LoraRun, PRESETS, __doc__, arguments)
    platform = rt.patch_environment(settings.get("platform", "auto"))
    launch(make_config(**settings), platform)


if __name__ == "__main__":
    rt.run_main(main)
