"""Pretrain a GPT from token shards: one loop for TPU, GPU and CPU.

    python py/train_gpt.py --data_folder data/shards --run_folder runs/gpt --max_steps 500
    python py/train_gpt.py --preset gpt2-124m --data_folder /kaggle/input/my-shards

or, from a notebook:  train_gpt.launch(train_gpt.make_config(data_folder="data/shards"), platform)

Everything the run produces lies in its run folder: log.jsonl, curve.png, samples.txt, config.json, checkpoints.
"""
import contextlib
import dataclasses
import hashlib
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import numpy as np
import torch

import checkpoint as ckpt
import report
import settings as template_settings
import telemetry
import token_data
import tpu_attention
from compile_guard import CompileGuard
from gpt import GPT, GPTConfig, attention_for, flops_per_token, generate, token_losses
from micro_steps import MicroSteps
from optimizer import adamw, decay_groups, set_learning_rate, warmup_cosine
from runtime import UserError
from settings import check_types, nearest_multiples, require


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run. The defaults are GPT-2 124M on a TPU v5e-8."""
    data_folder: str = "data/shards"    # token shards, made by data_prep/prepare.py
    run_folder: str = "runs/gpt"        # everything the run produces; an existing run is never overwritten
    resume_from: str = ""               # a checkpoint folder; resume_gpt fills it in
    init_from: str = ""                 # start from weights: a folder of export_gpt2, or a GPT-2; "": from scratch

    # the model
    vocab_size: int = 50304             # GPT-2's 50,257 padded to a multiple of 128; 0: take it from the data
    T: int = 1024                       # tokens in a window
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    qk_norm: bool = True
    attention: str = "auto"             # auto: kernels on a TPU, after a trial on the chip; plain: written out
    recompute: bool = False             # recompute blocks in the backward pass: less memory, about a third slower

    # the batch
    tokens_per_step: int = 524288       # tokens per optimizer step, over all devices and micro-steps
    micro_batch: int = 4                # windows that one device takes at a time; micro-steps follow from it

    # the optimizer
    max_steps: int = 19073              # 10 billion tokens; the learning rate ends here
    stop_at: int = 0                    # save and end this session at that step, to be resumed later; 0: at max_steps
    learning_rate: float = 6e-4         # the peak, after warm-up
    final_lr_fraction: float = 0.1      # the cosine ends at this part of the peak
    warmup_steps: int = 700
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    max_minutes: float = 0.0            # save and end with success when they are over, counted from the start of the session
                                        # on Kaggle, of the run elsewhere; 0: 510 on Kaggle (of 540), no limit elsewhere
    seed: int = 1337                    # initial weights, order of data and dropout follow from it

    # what is looked at, and when (in optimizer steps)
    log_every: int = 10
    eval_every: int = 250
    eval_windows: int = 320             # fixed validation windows, the same at every evaluation
    save_every: int = 500               # a checkpoint of GPT-2 124M is 1.5 GB, written beside the training
    save_minutes: float = 15.0          # save also when the last one is so old: a T4 takes hours for 500 steps; 0: off
    keep_checkpoints: int = 2
    sample_tokens: int = 120            # length of each of the three samples at the end; 0: none
    log_with: str = ""                  # also log to a tracker that Accelerate knows: tensorboard, wandb, mlflow, ...
    profile_steps: str = ""             # as in "10-12": record these steps, a trace for ui.perfetto.dev or TensorBoard

    # where it runs
    platform: str = "auto"              # auto, tpu, gpu, cpu, xla-cpu
    processes: int = 0                  # 0: all devices of the platform
    precision: str = "auto"             # auto: bf16 on TPU and recent GPUs, fp16 on a T4, fp32 on a CPU

    def __post_init__(self):
        check_types(self)
        for name in ("T", "n_layer", "n_head", "n_embd", "tokens_per_step", "micro_batch", "max_steps", "log_every",
                     "eval_every", "eval_windows", "save_every"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("vocab_size", "stop_at", "max_minutes", "save_minutes", "warmup_steps", "processes",
                     "sample_tokens", "seed", "weight_decay"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative.")
        require(self.n_embd % self.n_head == 0,
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: heads share the channels equally.")
        require(self.tokens_per_step % self.T == 0,
                f"tokens_per_step={self.tokens_per_step} is not a multiple of T={self.T}: the nearest are"
                f" {nearest_multiples(self.tokens_per_step, self.T)}.")
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1.")
        require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be above 0.")
        require(0 <= self.final_lr_fraction <= 1, f"final_lr_fraction={self.final_lr_fraction} must be between 0 and 1.")
        require(self.clip_norm > 0, f"clip_norm={self.clip_norm} must be above 0.")
        require(self.keep_checkpoints >= 2, f"keep_checkpoints={self.keep_checkpoints} must be at least 2: with one, a"
                " damaged file would be the end of the run.")
        require(self.attention in ("auto", "plain"), f"attention={self.attention!r} is not known: use 'auto' or 'plain'.")
        require(self.precision in ("auto", "fp32", "bf16", "fp16"),
                f"precision={self.precision!r} is not known: use 'auto', 'fp32', 'bf16' or 'fp16'.")
        profiled = telemetry.parse_steps(self.profile_steps)
        require(not profiled or profiled[-1] <= self.max_steps, f"profile_steps={self.profile_steps!r} ends after the"
                f" last step, max_steps={self.max_steps}.")

    @property
    def last_step(self) -> int:
        """Where this session ends."""
        return min(self.max_steps, self.stop_at or self.max_steps)

    @property
    def global_batch(self) -> int:
        """Windows per optimizer step, over all devices and micro-steps."""
        return self.tokens_per_step // self.T

    def model(self, vocab_size: int) -> GPTConfig:
        return GPTConfig(vocab_size, self.T, self.n_layer, self.n_head, self.n_embd, self.dropout, self.qk_norm)


PRESETS = {
    "gpt2-124m": {},
    # The matrix unit of a TPU is 128 wide: six heads of 128 instead of twelve of 64, the same parameters, much faster.
    "gpt2-124m-tpu": dict(n_head=6),
    # Bytes, a few minutes on two CPU cores.
    "demo": dict(vocab_size=0, T=128, n_layer=4, n_head=2, n_embd=128, tokens_per_step=2048, micro_batch=16, max_steps=1600,
                 learning_rate=3e-3, warmup_steps=100, log_every=40, eval_every=200, eval_windows=128, save_every=400),
    # For tests: seconds.
    "tiny": dict(vocab_size=0, T=32, n_layer=2, n_head=2, n_embd=32, tokens_per_step=256, micro_batch=4, max_steps=30,
                 learning_rate=1e-3, warmup_steps=5, log_every=1, eval_every=10, eval_windows=8, save_every=10,
                 sample_tokens=8),
}


def make_config(preset: str = "auto", **settings) -> TrainConfig:
    """A TrainConfig from a preset and settings that replace parts of it.

    preset: a name in PRESETS, or 'auto': GPT-2 124M on a TPU or GPU, the demo on a CPU. Raises UserError for an unknown
    preset or setting, naming the nearest known one.
    """
    if preset == "auto":
        found = rt.detect_platform(settings.get("platform", "auto"))
        preset = "gpt2-124m" if found.name in ("tpu", "gpu") else "demo"
    return template_settings.make_config(TrainConfig, PRESETS, preset, settings)


def count_micro_steps(config: TrainConfig, processes: int) -> int:
    """Micro-steps per optimizer step. Raises UserError with the nearest valid batch when the split does not come out."""
    at_once = config.micro_batch * processes
    require(config.global_batch % at_once == 0,
            f"tokens_per_step={config.tokens_per_step} is {config.global_batch} windows of T={config.T}, which"
            f" micro_batch={config.micro_batch} on {processes} processes cannot share equally: use tokens_per_step"
            f" {nearest_multiples(config.tokens_per_step, at_once * config.T)}, or another micro_batch.")
    return config.global_batch // at_once


def learning_rate(config: TrainConfig, step: int) -> float:
    return warmup_cosine(step, config.learning_rate, config.warmup_steps, config.max_steps, config.final_lr_fraction)


# ---- the worker ---------------------------------------------------------------------------------------------------------

def build_model(config: TrainConfig, geometry: GPTConfig) -> GPT:
    """The initial model on the CPU, a function of (seed, geometry): the same on every rank."""
    torch.manual_seed(rt.mix_seed(config.seed))
    return GPT(geometry)


def make_optimizer(config: TrainConfig, model, on_xla: bool) -> torch.optim.AdamW:
    return adamw(decay_groups(model, config.weight_decay), on_xla, flat=True, betas=(config.beta1, config.beta2))


@torch.no_grad()
def evaluate(model, runtime: rt.Runtime, split, config: TrainConfig) -> float:
    """Mean loss in nats per token over fixed windows, shared out over the ranks; each window counts exactly once.

    Every rank runs the same number of equal batches, so no rank waits alone and no shape is new. Rows that fill up the
    last batch are given no weight.
    """
    windows = token_data.eval_windows(split, config.eval_windows)
    at_once = config.micro_batch * runtime.world_size
    model.eval()
    total = runtime.number(0.0)
    for first in range(0, len(windows), at_once):
        mine = range(first + runtime.rank * config.micro_batch, first + (runtime.rank + 1) * config.micro_batch)
        x, y = on_device(split.windows_at([windows[min(row, len(windows) - 1)] for row in mine]), runtime)
        counts = torch.tensor([float(row < len(windows)) for row in mine]).to(runtime.device)
        total = total + (window_losses(model, runtime, x, y) * counts).sum()
        runtime.sync()
    model.train()
    return runtime.host_values(runtime.all_reduce(total, "sum"))[0] / len(windows)


def window_losses(model, runtime: rt.Runtime, x, y):
    """(B, T), (B, T) -> (B,) mean losses. A function of its own, so that no logits are alive, and kept, at the sync."""
    with runtime.autocast():
        logits = model(x)
    return token_losses(logits, y).mean(1)


def step_batches(split, config: TrainConfig, step: int, runtime: rt.Runtime) -> list:
    """This rank's x and y of all micro-steps of a step, on its device: (micro-steps, micro_batch, T).

    Micro-steps take their windows from the global batch in turn, and the ranks theirs from a micro-step's.
    """
    rows = np.arange(config.global_batch).reshape(-1, runtime.world_size, config.micro_batch)[:, runtime.rank]
    arrays = token_data.train_batch(split, config.seed, step, config.global_batch, rows.reshape(-1))
    return on_device([array.reshape(*rows.shape, config.T) for array in arrays], runtime)


def on_device(arrays, runtime: rt.Runtime):
    return [torch.from_numpy(array).to(runtime.device) for array in arrays]


def train_worker(config: TrainConfig, model: GPT | None = None) -> None:
    """Train up to config.max_steps on this rank; every rank runs this very function.

    model: built before the launch and shared by fork, for hosts with little memory; None to build it here.
    """
    runtime = rt.Runtime(config.precision, config.processes)
    shards = token_data.open_shards(config.data_folder, config.T, config.vocab_size or None)
    geometry = geometry_for(config, shards)
    micro_steps = count_micro_steps(config, runtime.world_size)
    resumed = ckpt.open_checkpoint(config.resume_from) if config.resume_from else None
    model, optimizer = set_up(config, geometry, runtime, resumed, model)
    progress = resumed.state() if resumed else {"step": 0, "best_val_loss": None}
    first = step = progress["step"]
    best = progress["best_val_loss"]
    describe_run(config, runtime, model, optimizer, shards, micro_steps, first)
    if progress.get("ran_on"):
        runtime.print(what_changed(progress["ran_on"], ran_on(config, runtime), config.dropout))

    log = telemetry.RunLog(config.run_folder, runtime.is_main, first, config.log_with, dataclasses.asdict(config))
    peak = telemetry.peak_flops(runtime.device_kind())
    speed = telemetry.Throughput(config.tokens_per_step, flops_per_token(geometry), peak and peak * runtime.world_size)

    def micro_step_loss(x, y):
        with runtime.autocast():
            return model(x, y) / micro_steps

    gradients = MicroSteps(runtime, micro_step_loss, model.parameters())
    profile = telemetry.Profile(runtime, config.profile_steps, config.run_folder)
    heartbeat = telemetry.Heartbeat(runtime.is_main)
    guard = CompileGuard(runtime, output=heartbeat.say)
    deadline, out_of_time, save_is_due = session_deadline(config.max_minutes), False, False
    stop_signals.listen()

    with heartbeat, ckpt.Writer(runtime.is_main) as writer, log, profile:
        while True:
            last, is_best = step >= config.last_step or out_of_time, False
            evaluates = (step % config.eval_every == 0 or step == config.max_steps) and (step > first or not resumed)
            saves = (step % config.save_every == 0 or save_is_due or last) and step > first
            if evaluates:
                heartbeat.report("evaluating")
                begun = time.monotonic()
                val_loss = evaluate(model, runtime, shards.val, config)
                is_best = best is None or val_loss < best
                best = val_loss if is_best else best
                per_byte = shards.per_byte(val_loss)        # None for files that do not say how much text they are
                log.write(step=step, val_loss=val_loss, val_nats_per_byte=per_byte,
                          eval_seconds=time.monotonic() - begun)
                heartbeat.say(f"step {step}  validation loss {val_loss:.4f} per token"
                              + (f", {per_byte:.4f} per byte" if per_byte is not None else ""))
            if saves:
                heartbeat.report("saving")
                begun = time.monotonic()
                save(config, runtime, writer, model, optimizer, shards, step, best, is_best)
                log.write(step=step, save_seconds=time.monotonic() - begun)
                save_is_due = False
            if last:
                break
            if step == first or evaluates or saves:
                speed.start(step)           # time that is not training is not counted as training
                begun = time.monotonic()

            heartbeat.report(f"step {step + 1}" + (", the first of this run, is compiled: 1 to 3 minutes on a TPU"
                                                   if runtime.is_xla and step == first else ""))
            profile.begin(step + 1)
            runtime.seed(config.seed, step, runtime.rank)
            set_learning_rate(optimizer, learning_rate(config, step), runtime.device)
            x, y = step_batches(shards.train, config, step, runtime)
            loss_sum = gradients(x, y)
            norm = runtime.optimizer_step(optimizer, config.clip_norm)
            with guard.watch(step + 1, loss_sum, x=x, y=y):
                runtime.sync()
            step += 1
            profile.end(step)

            if step % config.log_every == 0 or step in (first + 1, config.last_step):
                # What one rank wants, all do: above 0 in the mean, each of the three is decided for everybody.
                wishes = (time.monotonic() > deadline or stop_signals.wanted(), writer.is_due(config.save_minutes),
                          writer.failure_code())
                values = runtime.all_reduce(torch.cat([loss_sum, norm.view(1), *map(runtime.number, wishes)]))
                loss, grad_norm, out_of_time, save_is_due, failure = runtime.host_values(values)
                raise_if_failed(config, writer, failure * runtime.world_size)
                if step == first + 1:
                    speed.start(step)       # the first step compiles; its time says nothing
                record = dict(step=step, loss=loss, lr=learning_rate(config, step - 1), grad_norm=grad_norm,
                              tokens=step * config.tokens_per_step, **speed.read(step, config.last_step),
                              **runtime.usage(), **guard.summary())
                if step == first + 1:
                    record["first_step_seconds"] = time.monotonic() - begun
                    if resumed and (jumped := telemetry.jump_after_resume(config.run_folder, first, loss)):
                        heartbeat.say(jumped)
                log.write(**record)
                heartbeat.progress(telemetry.progress_line(record, config.max_steps))
                require(math.isfinite(loss), f"The loss is {loss} at step {step}: lower learning_rate or raise warmup_steps;"
                        f" the checkpoints in {config.run_folder} are untouched.")
        heartbeat.report("writing the last checkpoint")
        finish_saving(config, runtime, writer)
    stop_signals.end_soon()


KAGGLE_MINUTES = 510        # of 540: a version that is cut off at the limit keeps nothing


def session_deadline(max_minutes: float, kaggle: Path = Path("/kaggle/working")) -> float:
    """The time.monotonic() after which this session saves and ends."""
    on_kaggle = kaggle.is_dir()
    minutes = max_minutes or (KAGGLE_MINUTES if on_kaggle else math.inf)
    return time.monotonic() + 60 * minutes - (rt.seconds_since_session_start() if on_kaggle else 0)


def set_up(config: TrainConfig, geometry: GPTConfig, runtime: rt.Runtime, resumed, model: GPT | None):
    """The model on its device and its optimizer with state, at the beginning or from a checkpoint.

    The order matters: weights on the CPU, then the device, then the optimizer and its state, with a sync after each.
    """
    model = model or build_model(config, geometry)
    kernels = config.attention == "auto" and tpu_attention.choose(runtime, config.micro_batch, config.T, config.n_embd,
                                                                  config.n_head, config.qk_norm, config.dropout)
    model.use(attention_for(runtime.device.type), runtime.checkpoint_function() if config.recompute else None, kernels)
    if resumed or config.init_from:
        ckpt.load_model(model, resumed.model() if resumed else initial_weights(config, geometry))
    model.to(runtime.device).train()
    runtime.sync()
    optimizer = make_optimizer(config, model, runtime.is_xla)
    ckpt.load_optimizer(optimizer, model, resumed.optimizer() if resumed else None)
    if runtime.is_xla:
        for state in optimizer.state.values():      # equal numbers share one buffer on XLA, but only until the first step,
            state["step"] = state["step"] + 0       # which would make that step a program of its own after a resume
    if resumed and runtime.scaler.is_enabled() and resumed.state()["scaler"]:     # empty when it was saved without fp16
        runtime.scaler.load_state_dict(resumed.state()["scaler"])
    runtime.sync()
    runtime.check_replicas(dict(model.named_parameters()), "before the first step")
    return model, optimizer


def initial_weights(config: TrainConfig, geometry: GPTConfig) -> dict:
    import export_gpt2      # needed here alone
    return export_gpt2.weights_for(geometry, config.init_from)


def describe_run(config: TrainConfig, runtime: rt.Runtime, model: GPT, optimizer, shards, micro_steps: int, step: int) -> None:
    """Say what will be trained, on what, and how, in numbers that a reader can check."""
    dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    states = {str(value.dtype).removeprefix("torch.") for state in optimizer.state.values() for value in state.values()}
    peak = telemetry.peak_flops(runtime.device_kind())
    runtime.print(
        f"model: {sum(p.numel() for p in model.parameters()):,} parameters, {model.config}\n"
        f"device: {runtime.world_size} x {runtime.device_kind()}, peak "
        + (f"{peak / 1e12:.0f} TFLOP/s each" if peak else "unknown, so MFU is not shown") + "\n"
        f"precision: weights {'/'.join(dtypes)}, optimizer state {'/'.join(states)}, matrix work {runtime.precision},"
        f" norms, softmax and loss fp32; attention: {model.attention_name()}\n"
        f"batch: {config.tokens_per_step:,} tokens = {config.micro_batch} windows x {config.T} tokens x {micro_steps}"
        f" micro-steps x {runtime.world_size} processes\n"
        f"data: {shards.train.tokens:,} training tokens ({shards.encoding}), a pass every"
        f" {shards.train.windows / config.global_batch:,.0f} steps; validation {shards.val.tokens:,} tokens\n"
        f"steps: {step} to {config.last_step} of {config.max_steps}, all replicas start with the same weights")


def save(config: TrainConfig, runtime: rt.Runtime, writer: ckpt.Writer, model, optimizer, shards, step: int,
         best: float | None, is_best: bool) -> None:
    """Check that the replicas agree, copy everything to the host, and let the writer go on from there.

    All ranks must call it. The write before this one is finished first, so at most one copy is held.
    """
    runtime.check_replicas(dict(model.named_parameters()), f"at step {step}")
    parameters = sum(p.numel() for p in model.parameters())
    writer.start(ckpt.require_room_for_one, config.run_folder, parameters)      # its failure is shared like any other
    finish_saving(config, runtime, writer)
    if runtime.is_main:
        state = dict(config=dataclasses.asdict(config), best_val_loss=best, data=data_identity(shards),
                     vocab_size=model.config.vocab_size, data_vocab_size=shards.vocab_size,
                     scaler=runtime.scaler.state_dict(), ran_on=ran_on(config, runtime))
        writer.start(write_checkpoint, config, shards, step, ckpt.model_tensors(model),
                     ckpt.optimizer_tensors(optimizer, model), state, is_best)


def write_checkpoint(config: TrainConfig, shards, step: int, model: dict, optimizer: dict, state: dict,
                     is_best: bool) -> None:
    """The writer's job: the new checkpoint, complete and verified; only then the best, the old ones and the curve."""
    path = ckpt.save(config.run_folder, ckpt.step_folder(step), step, model, optimizer, state)
    if is_best:
        ckpt.copy(path, config.run_folder, "best")
    ckpt.remove_old(config.run_folder, config.keep_checkpoints)
    try:
        telemetry.draw_curve(config.run_folder, reference_losses(shards))
    except Exception as error:      # a picture is no reason to end a run whose checkpoint is good
        print(f"the curve could not be drawn: {error!r}", flush=True)


def finish_saving(config: TrainConfig, runtime: rt.Runtime, writer: ckpt.Writer) -> None:
    """Wait until all is on disk. A failure ends all ranks: one that raised alone would leave the others waiting."""
    writer.wait()
    code = runtime.number(writer.failure_code())
    raise_if_failed(config, writer, runtime.host_values(runtime.all_reduce(code, "max"))[0])


def raise_if_failed(config: TrainConfig, writer: ckpt.Writer, code: float) -> None:
    """End this rank with the writer's reason, of which the other ranks know only the system's error number `code`."""
    if not code:
        return
    if writer.failure and not isinstance(writer.failure, OSError):
        raise writer.failure
    if not writer.failure:
        time.sleep(2)       # the launcher shows the first words, and those of the rank that wrote say more
    reason = (writer.failure.strerror or str(writer.failure)) if writer.failure else os.strerror(round(code))
    raise UserError(f"The newest checkpoint could not be written to {config.run_folder}: {reason}. Older checkpoints"
                    " are untouched; make room and resume.")


def ran_on(config: TrainConfig, runtime: rt.Runtime) -> dict:
    """What a checkpoint does not depend on, but the digits of a run do."""
    return dict(processes=runtime.world_size, micro_batch=config.micro_batch, device=runtime.device_kind(),
                precision=runtime.precision)


def what_changed(before: dict, now: dict, dropout: float) -> str:
    """What a resumed run does differently from the saved one, and what that means. Both as from `ran_on`."""
    changes = [f"{name} {before[name]} -> {value}" for name, value in now.items() if before.get(name, value) != value]
    if not changes:
        return "resumed on the same kind of device: exact, as if it had never stopped"
    differs = "dropout and the rounding of sums differ" if dropout and before["processes"] != now["processes"] else \
        "the rounding of sums differs"
    return (f"resumed with {', '.join(changes)}: the order of data and the learning rates stay the same, {differs}, so"
            " the losses are close, not equal to the bit")


def data_identity(shards) -> str:
    """A hash that changes when the training data does."""
    return hashlib.sha256(json.dumps(shards.manifest["splits"], sort_keys=True).encode()).hexdigest()


def reference_losses(shards) -> dict:
    """{label: nats per token} of the byte models that the preparation measured on the same validation text."""
    return {name: shards.reference[f"{name}_nats_per_byte"] * shards.bytes_per_token("val")
            for name in ("unigram", "bigram") if f"{name}_nats_per_byte" in (shards.reference or {})}


def geometry_for(config: TrainConfig, shards) -> GPTConfig:
    return config.model(config.vocab_size or padded_vocabulary(shards.vocab_size))


def count_parameters(geometry: GPTConfig) -> int:
    with torch.device("meta"):          # shapes alone: no memory, no random numbers
        return sum(p.numel() for p in GPT(geometry).parameters())


def padded_vocabulary(size: int) -> int:
    """The next multiple of 128, the width of a TPU's matrix unit."""
    return -(-size // 128) * 128


# ---- the parent -------------------------------------------------------------------------------------------------------

def launch(config: TrainConfig, platform: rt.Platform | None = None, model: GPT | None = None) -> Path:
    """Check everything, train on all devices, show the result. Returns the run folder.

    Raises UserError before any process starts and before anything is written when a setting or the data cannot work.
    """
    platform = platform or rt.patch_environment(config.platform)
    config = dataclasses.replace(config, processes=rt.resolve_processes(platform, config.processes))
    count_micro_steps(config, config.processes)
    require(not (platform.uses_xla and config.recompute and config.dropout),
            f"recompute=True with dropout={config.dropout} would drop other values when it computes a block again than it"
            " dropped before, on XLA: use dropout=0.0 or recompute=False.")
    telemetry.check_tracker(config.log_with)
    shards = token_data.open_shards(config.data_folder, config.T, config.vocab_size or None)
    if not config.resume_from:
        config = dataclasses.replace(config, run_folder=str(ckpt.unused_run_folder(config.run_folder)))
    geometry = geometry_for(config, shards)
    ckpt.require_room(config.run_folder, count_parameters(geometry), config.keep_checkpoints)
    if config.init_from and not config.resume_from:
        initial_weights(config, geometry)       # refused here, not in every worker
    folder = Path(config.run_folder)
    is_main = rt.outer_launch()[1] == 0
    with ckpt.run_of(config, is_main), stop_signals:
        run_workers(config, model, platform)
    if stop_signals.received and steps_done(config) < config.last_step:
        say_how_to_go_on(config)
        raise SystemExit(128 + stop_signals.received)       # as the shell would say it; a notebook runs no further cell
    if is_main:
        show_result(config)
    return folder


def run_workers(config: TrainConfig, model: GPT | None, platform: rt.Platform) -> None:
    """Train on all devices. What a failed rank said is kept in the run folder where that still takes it."""
    try:
        rt.launch(train_worker, (config, model), platform, config.processes, Path(config.run_folder) / "failures")
    except UserError as error:
        # For several processes Accelerate's launcher takes over the handlers, and raises once all have saved.
        ended_by = re.search(r"got signal: (\d+)", str(error))
        if not ended_by:
            raise
        stop_signals.received = int(ended_by.group(1))


class StopSignals:
    """SIGTERM and SIGINT as a wish: train to the next logged step, save, end. A second one ends at once.

    `with stop_signals:` in the process that launches; `listen()` in a worker. A forked worker whose main thread is not
    ours, as on a TPU, has the launcher's handler from birth.
    """

    def __init__(self):
        self.received, self.at, self.launcher, self.before = 0, 0.0, 0, {}

    def __enter__(self):
        self.received, self.launcher = 0, os.getpid()
        self.before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        self.listen()
        return self

    def __exit__(self, *_):
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.handle)

    def wanted(self) -> bool:
        """Whether this worker shall save and end: a signal came, or the process that launched it is gone."""
        return self.received > 0 or self.launcher not in (0, os.getpid(), os.getppid())

    def handle(self, number: int, frame) -> None:
        """One press may arrive twice, from the terminal and from the launcher: within a second it is one."""
        is_launcher = os.getpid() == self.launcher
        if self.received and time.monotonic() - self.at > 1:
            return self.end_now(number, is_launcher)
        if not self.received:
            self.received, self.at = number, time.monotonic()
            if is_launcher:
                os.write(2, b"stopping: saves at the next logged step, then ends; once more ends at once\n")
                self.pass_on(number)

    def end_soon(self) -> None:
        """After the last save. Accelerate's launcher, stopped by the signal too, would leave its workers waiting 30 s."""
        if self.received and self.launcher not in (0, os.getpid()):
            timer = threading.Timer(2.0, os._exit, (0,))
            timer.daemon = True
            timer.start()

    def pass_on(self, number: int) -> None:
        for child in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def end_now(self, number: int, is_launcher: bool) -> None:
        if is_launcher:                             # the launch ends its workers on the way out
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


stop_signals = StopSignals()


def show_result(config: TrainConfig) -> None:
    """Print validation loss against the byte models, three samples, and where everything lies."""
    shards = token_data.open_shards(config.data_folder, config.T, config.vocab_size or None)
    losses = [record for record in telemetry.read_log(config.run_folder) if "val_loss" in record]
    if config.sample_tokens:
        rt.launch(write_samples, (config,), rt.Platform("cpu", 1, "sampling"))
        print((Path(config.run_folder) / SAMPLES).read_text())
    if losses:
        per_byte = losses[-1]["val_nats_per_byte"]
        print(f"validation loss in nats per byte: this GPT {per_byte:.3f}"
              + "".join(f", {name} {shards.per_byte(loss):.3f}" for name, loss in reference_losses(shards).items())
              if per_byte is not None else f"validation loss in nats per token: {losses[-1]['val_loss']:.3f}")
    print(report.table(report.write(config.run_folder)))
    if steps_done(config) < config.max_steps:
        say_how_to_go_on(config)
    print(f"run folder: {config.run_folder}\n  curve {telemetry.CURVE_NAME}, log {telemetry.LOG_NAME}, report"
          f" {report.REPORT_NAME}, samples {SAMPLES}, checkpoints"
          f" {', '.join(sorted(p.name for p in Path(config.run_folder).glob('step_*')))} and best")


def steps_done(config: TrainConfig) -> int:
    return max((record["step"] for record in telemetry.read_log(config.run_folder)), default=0)


def say_how_to_go_on(config: TrainConfig) -> None:
    print(f"stopped and saved at step {steps_done(config)} of {config.max_steps}: continue with the notebook gpt_resume,"
          f" or with py/resume_gpt.py --source {config.run_folder}")


SAMPLES, PROMPT_TOKENS, SAMPLE_COUNT = "samples.txt", 24, 3


def write_samples(config: TrainConfig) -> None:
    """Continue three beginnings of validation text with the newest checkpoint, on the CPU, into samples.txt."""
    torch.set_num_threads(min(16, rt.available_cores()))    # a TPU host has hundreds, which would only wait for each other
    shards = token_data.open_shards(config.data_folder, config.T, config.vocab_size or None)
    newest = ckpt.find_newest(config.run_folder)
    model = GPT(config.model(newest.state()["vocab_size"]))
    ckpt.load_model(model, newest.model())
    prompts, _ = shards.val.windows_at(token_data.eval_windows(shards.val, SAMPLE_COUNT))
    length = min(PROMPT_TOKENS, config.T)
    tokens = generate(model, torch.from_numpy(prompts)[:, :length], config.sample_tokens, shards.vocab_size,
                      generator=torch.Generator().manual_seed(config.seed))
    decode = decoder(shards.encoding)
    texts = [f"--- sample {number}: prompt >>> continuation ---\n{decode(row[:length])}>>>{decode(row[length:])}"
             for number, row in enumerate(tokens.tolist(), 1)]
    (Path(config.run_folder) / SAMPLES).write_text("\n".join(texts) + "\n")


def decoder(encoding_name: str):
    """token ids -> text; ids as they are where the tokenizer cannot be had. Training itself never needs a tokenizer."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "data_prep"))     # in a notebook it lies beside this file
    from text_encodings import get_encoding
    try:
        return get_encoding(encoding_name).decode
    except UserError as error:
        print(f"samples are shown as token ids: {error}")
        return str


def settings_from_command_line(arguments: list | None = None) -> dict:
    return template_settings.settings_from_command_line(TrainConfig, PRESETS, __doc__, arguments)


def main(arguments: list | None = None) -> None:
    settings = settings_from_command_line(arguments)
    platform = rt.patch_environment(settings.get("platform", "auto"))
    launch(make_config(**settings), platform)


if __name__ == "__main__":
    rt.run_main(main)
