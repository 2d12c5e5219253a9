"""Train a ResNet to tell images apart: CIFAR-10 on a TPU or GPU, scikit-learn's digits in a minute on a CPU.

    python py/train_images.py                                       # CIFAR-10 among the Kaggle inputs, else the digits
    python py/train_images.py --data cifar-10-python.tar.gz --epochs 30

or, from a notebook:  train_images.launch(train_images.make_config(data="digits"), platform)

Everything the run produces lies in its run folder: log.jsonl, curve.png, confusion.png, mistakes.png, predictions.npz,
model.safetensors, config.json.
"""
import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import checkpoint as ckpt
import image_data
import settings as template_settings
import telemetry
from classification import confusion_matrix, draw_confusion, eval_loader, evaluate, train_loader
from compile_guard import CompileGuard
from optimizer import adamw, decay_groups, set_learning_rate, warmup_cosine
from settings import check_ranges, check_types, nearest_multiples, require, require_equal_shares


@dataclass(frozen=True)
class ImageConfig:
    """Every setting of a run. The defaults are ResNet-18 on CIFAR-10, for a TPU v5e-8."""
    data: str = "auto"                  # CIFAR-10's archive or folder, or digits; auto: a Kaggle input, else digits
    run_folder: str = "runs/images"     # everything the run produces; an existing run is never overwritten

    # the model: ResNet-18 in the form for small images (no pooling, the first stage at full size)
    width: int = 64                     # channels of the first stage, doubled by each further one
    stages: int = 4
    blocks: int = 2                     # residual blocks in a stage

    # the training
    batch: int = 1024                   # images per optimizer step, over all devices
    epochs: int = 30                    # the learning rate ends here
    learning_rate: float = 2e-3         # the peak, after warm-up
    final_lr_fraction: float = 0.01
    warmup_epochs: int = 3
    weight_decay: float = 0.05
    clip_norm: float = 5.0
    augment: bool = True                # shift by up to an eighth; mirror where the image means the same mirrored
    seed: int = 1337                    # initial weights, order and augmentation follow from it

    log_every: int = 20                 # optimizer steps
    eval_every: int = 5                 # epochs; the last one is always evaluated

    # where it runs
    platform: str = "auto"              # auto, tpu, gpu, cpu, xla-cpu, virtual-tpu
    processes: int = 0                  # 0: all devices of the platform
    precision: str = "auto"             # auto: bf16 on TPU and recent GPUs, fp16 on a T4, fp32 on a CPU

    def __post_init__(self):
        check_types(self)
        check_ranges(self, {1: ("width", "stages", "blocks", "batch", "epochs", "log_every", "eval_every"),
                            0: ("warmup_epochs", "weight_decay", "seed", "processes")})
        require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be above 0.")
        require(self.clip_norm > 0, f"clip_norm={self.clip_norm} must be above 0.")


PRESETS = {
    "resnet18": {},
    # Digits of 8 x 8 pixels, a minute on two CPU cores.
    "small": dict(width=16, stages=2, blocks=1, batch=64, epochs=12, warmup_epochs=1, learning_rate=1e-2, eval_every=4),
}


def make_config(preset: str = "auto", **settings) -> ImageConfig:
    """An ImageConfig from a preset and settings that replace parts of it; 'auto': ResNet-18 except on a CPU."""
    if preset == "auto":
        preset = "resnet18" if rt.detect_platform(settings.get("platform", "auto")).name in ("tpu", "gpu") else "small"
    return template_settings.make_config(ImageConfig, PRESETS, preset, settings)


# ---- the model -------------------------------------------------------------------------------------------------------

class ResNet(nn.Module):
    """A residual network for small images: (B, C, H, W) uint8 -> (B, classes) logits."""

    def __init__(self, config: ImageConfig, images: np.ndarray, classes: int):
        """images: the training images, (N, C, H, W) uint8; each channel is brought to mean 0 and deviation 1."""
        super().__init__()
        widths = [config.width * 2 ** stage for stage in range(config.stages)]
        self.register_buffer("mean", torch.tensor(images.mean((0, 2, 3)), dtype=torch.float32).view(1, -1, 1, 1))
        self.register_buffer("deviation", torch.tensor(images.std((0, 2, 3)), dtype=torch.float32).view(1, -1, 1, 1))
        self.first = nn.Sequential(convolution(images.shape[1], widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU())
        blocks, channels = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(config.blocks):
                blocks.append(Block(channels, width, stride=2 if stage and not block else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images):
        x = (images.float() - self.mean) / self.deviation
        return self.head(self.blocks(self.first(x)).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions around which the input is led: (B, C, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(convolution(channels, width, stride), nn.BatchNorm2d(width), nn.ReLU(),
                                  convolution(width, width), nn.BatchNorm2d(width))
        self.around = (nn.Identity() if channels == width and stride == 1 else
                       nn.Sequential(convolution(channels, width, stride, size=1), nn.BatchNorm2d(width)))

    def forward(self, x):
        return F.relu(self.body(x) + self.around(x))


def convolution(channels: int, width: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    return nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)


def weights_and_statistics(model: nn.Module) -> dict:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def share_statistics(model: nn.Module, runtime: rt.Runtime) -> None:
    """Give every rank the mean of all ranks' BatchNorm statistics. All ranks must call it, before each evaluation.

    In training each rank normalises by its own share of the batch, as GPUs do too without SyncBatchNorm, so the running
    statistics drift apart; with them, the ranks would evaluate different models.
    """
    buffers = [buffer for name, buffer in model.named_buffers() if "running" in name]
    flat = runtime.all_reduce(torch.cat([buffer.reshape(-1) for buffer in buffers]), "mean")
    with torch.no_grad():
        for buffer, piece in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
            buffer.copy_(piece)
    runtime.sync()


def flops_per_image(model: nn.Module, shape: tuple) -> float:
    """Training flops of an image: three times those of the forward pass. Matrix work only, as PyTorch counts it."""
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.zeros(1, *shape, dtype=torch.uint8))
    model.train()
    return 3.0 * counter.get_total_flops()


# ---- the data --------------------------------------------------------------------------------------------------------

class Images(Dataset):
    """Batches of an ImageSet; with a seed, shifted and mirrored as a function of (seed, epoch, row) alone."""

    def __init__(self, image_set: image_data.ImageSet, augment_seed: int | None = None):
        self.set, self.seed, self.shift = image_set, augment_seed, image_set.images.shape[-1] // 8
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if self.seed is not None:
            draw = np.random.default_rng(rt.mix_seed(self.seed, epoch))
            self.shifts = draw.integers(0, 2 * self.shift + 1, (2, len(self.set)))
            self.mirrored = draw.random(len(self.set)) < (0.5 if self.set.mirrors else 0.0)

    def __len__(self) -> int:
        return len(self.set)

    def __getitems__(self, rows: list) -> dict:
        """{'images': (B, C, H, W) uint8, 'labels': (B,) int64} of a whole batch at once."""
        images = self.set.images[rows]
        if self.seed is not None:
            images = self.moved(images, rows)
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(self.set.labels[rows])}

    def moved(self, images: np.ndarray, rows: list) -> np.ndarray:
        height, width = images.shape[2:]
        padded = np.pad(images, ((0, 0), (0, 0), (self.shift,) * 2, (self.shift,) * 2))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        down, right = self.shifts[:, rows]
        images = windows[np.arange(len(rows)), :, down, right]
        return np.where(self.mirrored[rows][:, None, None, None], images[..., ::-1], images)


# ---- the worker ------------------------------------------------------------------------------------------------------

def train_worker(config: ImageConfig) -> None:
    """Train on this rank; every rank runs this very function."""
    runtime = rt.Runtime(config.precision, config.processes)                # 1. device, rank, precision
    train_set, test_set = image_data.load(config.data)
    torch.manual_seed(rt.mix_seed(config.seed))                             # 2. the same initial weights on every rank
    model = ResNet(config, train_set.images, len(train_set.names))
    flops = flops_per_image(model, train_set.images.shape[1:])
    model.to(runtime.device)
    optimizer = adamw(decay_groups(model, config.weight_decay), runtime.is_xla)     # 3. nothing in it that changes
    ckpt.load_optimizer(optimizer, model)       # its state now, not inside step one: that would be a program of its own
    runtime.check_replicas(weights_and_statistics(model), "before the first step")

    train_images = Images(train_set, config.seed if config.augment else None)
    batches = train_loader(train_images, config.batch, runtime, config.seed)    # 4. each rank's share, on its device
    test_batches = eval_loader(Images(test_set), config.batch, runtime)
    steps_per_epoch = len(train_set) // config.batch
    last_step, step = config.epochs * steps_per_epoch, 0
    describe_run(config, runtime, model, train_set, test_set, last_step)

    log, guard = telemetry.RunLog(config.run_folder, runtime.is_main), CompileGuard(runtime)
    peak = telemetry.peak_flops(runtime.device_kind())
    speed = telemetry.Throughput(config.batch, flops, peak and peak * runtime.world_size, unit="images")

    with telemetry.Heartbeat(runtime.is_main) as heartbeat:
        for epoch in range(config.epochs):
            batches.set_epoch(epoch)
            speed.start(step)       # time that is not training is not counted as training
            for batch in batches:
                heartbeat.report(f"step {step + 1}" + (", the first, is compiled: a minute or two on a TPU"
                                                       if runtime.is_xla and step == 0 else ""))
                rate = warmup_cosine(step, config.learning_rate, config.warmup_epochs * steps_per_epoch, last_step,
                                     config.final_lr_fraction)
                set_learning_rate(optimizer, rate, runtime.device)
                with runtime.autocast():                                            # 5. bf16 work over fp32 weights
                    logits = model(batch["images"])
                loss = F.cross_entropy(logits.float(), batch["labels"])
                runtime.scaler.scale(loss).backward()
                norm = runtime.optimizer_step(optimizer, config.clip_norm)          # 6. average over ranks, clip, step
                with guard.watch(step + 1, loss, **batch):
                    runtime.sync()                                                  # 7. hand the step to the device
                step += 1
                if step % config.log_every == 0 or step in (1, last_step):
                    values = runtime.all_reduce(torch.stack([loss.detach(), norm]))
                    mean_loss, mean_norm = runtime.host_values(values)              # 8. read rarely, on all ranks
                    if step == 1:
                        speed.start(step)       # the first step compiles; its time says nothing
                    record = dict(step=step, epoch=epoch + 1, loss=mean_loss, lr=rate, grad_norm=mean_norm,
                                  **speed.read(step, last_step), compiles=runtime.compile_count())
                    log.write(**record)
                    heartbeat.progress(telemetry.progress_line(record, last_step, "images"))
                    require(math.isfinite(mean_loss), f"The loss is {mean_loss} at step {step}: lower learning_rate.")
            if (epoch + 1) % config.eval_every == 0 or epoch + 1 == config.epochs:
                heartbeat.report("evaluating")
                share_statistics(model, runtime)                                    # 9. one model, not one a rank
                result = evaluate(model, lambda batch: model(batch["images"]), test_batches, runtime, len(test_set))
                accuracy = result.accuracy(test_set.labels)
                log.write(step=step, epoch=epoch + 1, val_loss=result.loss, accuracy=accuracy,
                          compiles=runtime.compile_count())
                heartbeat.say(f"epoch {epoch + 1}/{config.epochs}  test loss {result.loss:.4f}"
                              f"  accuracy {accuracy:.2%}")
        heartbeat.report("saving")
        runtime.check_replicas(weights_and_statistics(model), "at the end")
        if runtime.is_main:
            save(config, model, result)


def describe_run(config: ImageConfig, runtime: rt.Runtime, model, train_set, test_set, last_step: int) -> None:
    shape = "x".join(map(str, train_set.images.shape[1:]))
    runtime.print(
        f"model: ResNet, {sum(p.numel() for p in model.parameters()):,} parameters, {config.stages} stages of"
        f" {config.blocks} blocks, {config.width} to {config.width * 2 ** (config.stages - 1)} channels\n"
        f"device: {runtime.world_size} x {runtime.device_kind()}; weights and optimizer state fp32, convolutions"
        f" {runtime.precision}, BatchNorm and loss fp32\n"
        f"data: {train_set.source}, {len(train_set):,} training and {len(test_set):,} test images of {shape}\n"
        f"batch: {config.batch} images = {config.batch // runtime.world_size} x {runtime.world_size} processes, of"
        f" which BatchNorm sees its own {config.batch // runtime.world_size}; {config.epochs} epochs,"
        f" {last_step} steps")


def save(config: ImageConfig, model: nn.Module, result) -> None:
    """The model as safetensors, and what it says of each test image. On the main process only."""
    folder = Path(config.run_folder)
    tensors = {name: ckpt.host_copy(tensor) for name, tensor in ckpt.unwrap(model).state_dict().items()}
    ckpt.save_file(tensors, folder / ".partial_model")
    os.replace(folder / ".partial_model", folder / ckpt.MODEL)
    np.savez(folder / PREDICTIONS, predicted=result.predicted, losses=result.losses)


PREDICTIONS = "predictions.npz"


# ---- the parent ------------------------------------------------------------------------------------------------------

def launch(config: ImageConfig, platform: rt.Platform | None = None) -> Path:
    """Check everything, train on all devices, draw the results. Returns the run folder.

    Raises UserError before any process starts and before anything is written when a setting or the data cannot work.
    """
    platform = platform or rt.patch_environment(config.platform)
    config = dataclasses.replace(config, processes=rt.resolve_processes(platform, config.processes))
    train_set, test_set = image_data.load(config.data)
    check_batch(config, train_set)
    config = dataclasses.replace(config, run_folder=str(ckpt.unused_run_folder(config.run_folder)))
    folder = Path(config.run_folder)
    is_main = rt.outer_launch()[1] == 0
    with ckpt.run_of(config, is_main):
        rt.launch(train_worker, (config,), platform, config.processes)
        if is_main:
            show_result(folder, test_set)
    return folder


def check_batch(config: ImageConfig, train_set) -> None:
    require_equal_shares(config.batch, config.processes)
    require(config.batch <= len(train_set),
            f"batch={config.batch} is more than the {len(train_set):,} training images of {train_set.source}: use a"
            f" smaller one, {nearest_multiples(min(64, len(train_set)), config.processes)} for instance.")
    smallest, halvings = min(train_set.images.shape[2:]), config.stages - 1
    require(smallest >= 2 ** halvings, f"stages={config.stages} halve the images {halvings} times, and they have only"
            f" {smallest} pixels: use stages={int(math.log2(smallest)) + 1} or fewer.")


def show_result(folder: Path, test_set: image_data.ImageSet) -> None:
    """Draw the curve, the confusion matrix and the mistakes; print the accuracy and where everything lies."""
    predicted, losses = (np.load(folder / PREDICTIONS)[name] for name in ("predicted", "losses"))
    matrix = confusion_matrix(test_set.labels, predicted, len(test_set.names))
    right = int(np.trace(matrix))
    telemetry.draw_curve(folder, unit="nats per image")
    draw_confusion(folder, matrix, test_set.names, f"{test_set.source}: {right:,} of {len(test_set):,} right")
    draw_mistakes(folder, test_set, predicted, losses)
    print(f"test accuracy: {right / len(test_set):.2%}, {right:,} of {len(test_set):,} images, each counted once\n"
          f"run folder: {folder}\n  model {ckpt.MODEL}, log {telemetry.LOG_NAME}, {PREDICTIONS}, pictures"
          f" {telemetry.CURVE_NAME}, confusion.png, mistakes.png")


def draw_mistakes(folder: Path, test_set: image_data.ImageSet, predicted: np.ndarray, losses: np.ndarray,
                  columns: int = 6, rows: int = 4) -> Path:
    """mistakes.png: the wrong images that the model was most sure of, the worst first; returns its path."""
    from matplotlib.figure import Figure
    wrong = np.flatnonzero(predicted != test_set.labels)
    worst = wrong[np.argsort(-losses[wrong])][:columns * rows]
    columns = min(columns, max(3, len(worst)))
    rows = max(1, -(-len(worst) // columns))
    figure = Figure(figsize=(1.6 * columns, 1.75 * rows + 0.5), dpi=110, layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.set_axis_off()
    for axes, index in zip(figure.axes, worst):
        picture = test_set.images[index].transpose(1, 2, 0)
        axes.imshow(picture.squeeze(), cmap="gray" if picture.shape[2] == 1 else None)
        true, taken = (test_set.names[label[index]] for label in (test_set.labels, predicted))
        axes.set_title(f"{true}, taken\nfor {taken}", fontsize=9)
    figure.suptitle(f"{len(wrong):,} of {len(test_set):,} test images wrong"
                    + (f", the {len(worst)} with the largest loss" if len(wrong) > len(worst) else ""))
    return telemetry.save_figure(figure, folder / "mistakes.png")


def main(arguments: list | None = None) -> None:
    settings = template_settings.settings_from_command_line(ImageConfig, PRESETS, __doc__, arguments)
    platform = rt.patch_environment(settings.get("platform", "auto"))
    launch(make_config(**settings), platform)


if __name__ == "__main__":
    rt.run_main(main)
