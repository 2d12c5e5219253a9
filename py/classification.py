"""What every classifier needs: batches of one shape, an evaluation that counts each example once, and its pictures.

    loader = train_loader(dataset, batch, runtime, seed)        # a DataLoader, prepared by Accelerate
    result = evaluate(lambda batch: model(batch["images"]), eval_loader(dataset, batch, runtime), runtime, len(dataset))

A dataset here has __len__ and __getitems__(rows) -> {name: tensor (rows, ...)}, with 'labels' among the names: PyTorch
then asks for a whole batch at once. One that changes with the epoch (augmentation) has set_epoch(epoch) too.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

import runtime as rt
import telemetry


class SeededOrder(Sampler):
    """Every row once an epoch, in an order that is a function of (seed, epoch): the same for any number of processes.

    Not DataLoader's shuffle: that draws from a generator whose state Accelerate would have to send around.
    """

    def __init__(self, dataset, seed: int):
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Called by the prepared loader, whose own set_epoch the training loop calls."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self):
        generator = torch.Generator().manual_seed(rt.mix_seed(self.seed, self.epoch))
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist())


class EachOnce(Dataset):
    """A dataset, filled up to whole batches for all ranks. `rows` says which row each is; -1: filling, left out."""

    def __init__(self, dataset, batch: int):
        self.dataset, self.length = dataset, -(-len(dataset) // batch) * batch

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, rows: list) -> dict:
        last = len(self.dataset) - 1
        batch = self.dataset.__getitems__([min(row, last) for row in rows])
        return {**batch, "rows": torch.tensor([row if row <= last else -1 for row in rows])}


def train_loader(dataset, batch: int, runtime: rt.Runtime, seed: int) -> DataLoader:
    """Batches of `batch` examples over all ranks, of which this rank gets its share. Call set_epoch before each pass.

    drop_last: a smaller last batch would be another shape, and on a TPU another compilation.
    """
    loader = DataLoader(dataset, batch // runtime.world_size, sampler=SeededOrder(dataset, seed), drop_last=True,
                        collate_fn=as_it_is)
    return runtime.accelerator.prepare(loader)


def eval_loader(dataset, batch: int, runtime: rt.Runtime) -> DataLoader:
    """The whole dataset in its own order, in batches of the shape of training."""
    loader = DataLoader(EachOnce(dataset, batch), batch // runtime.world_size, collate_fn=as_it_is)
    return runtime.accelerator.prepare(loader)


def as_it_is(batch: dict) -> dict:
    return batch


@dataclass(frozen=True)
class Evaluation:
    """What a model says of every example of a set, the same on every rank."""
    predicted: np.ndarray       # (N,) classes
    losses: np.ndarray          # (N,) nats

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    def accuracy(self, labels: np.ndarray) -> float:
        return float((self.predicted == labels).mean())


@torch.no_grad()
def evaluate(model, predict, loader, runtime: rt.Runtime, examples: int) -> Evaluation:
    """Predict every example of `loader` once, shared out over the ranks. All ranks must call it; all get the same.

    predict: batch -> (B, classes) logits. Each rank notes the rows that it saw, what it predicted and the losses; the
    three are put together by one reduction, and it is checked that each example was seen exactly once.
    """
    model.eval()
    notes = []
    for batch in loader:
        with runtime.autocast():
            logits = predict(batch)
        losses = F.cross_entropy(logits.float(), batch["labels"], reduction="none")
        notes.append(torch.stack([batch["rows"].float(), logits.argmax(1).float(), losses]))     # (3, B)
        runtime.sync()
    model.train()
    mine = np.array(runtime.host_values(torch.cat(notes, 1)))
    mine = mine[:, mine[0] >= 0]
    table = np.zeros((3, examples), dtype=np.float32)
    np.add.at(table, (slice(None), mine[0].astype(int)), np.stack([np.ones(mine.shape[1]), mine[1], mine[2]]))
    seen, predicted, losses = np.array(runtime.host_values(
        runtime.all_reduce(torch.from_numpy(table).to(runtime.device), "sum")))
    check_each_seen_once(seen)
    return Evaluation(predicted.astype(int), losses)


def check_each_seen_once(seen: np.ndarray) -> None:
    wrong = int((seen != 1).sum())
    if wrong:
        raise RuntimeError(f"the evaluation did not see {wrong} of {len(seen)} examples exactly once")


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes): how many of each row's class were taken for each column's."""
    return np.bincount(labels * classes + predicted, minlength=classes ** 2).reshape(classes, classes)


def draw_confusion(folder: str | Path, matrix: np.ndarray, names: tuple, title: str) -> Path:
    """confusion.png: the matrix as shares of each row, with the counts written in; returns its path."""
    from matplotlib.figure import Figure        # the figure alone: no pyplot, no global state, no display
    size = max(5.2, 0.62 * len(names) + 1.5)
    figure = Figure(figsize=(size + 0.6, size), dpi=110, layout="constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            axes.text(column, row, f"{count}", ha="center", va="center", fontsize=8,
                      color="white" if shares[row, column] > 0.5 else "black")
    axes.set(xticks=range(len(names)), yticks=range(len(names)), xlabel="predicted", ylabel="true")
    axes.set_title(title, fontsize=10)
    long = max(map(len, names)) > 2
    axes.set_xticklabels(names, rotation=45 if long else 0, ha="right" if long else "center")
    axes.set_yticklabels(names)
    figure.colorbar(picture, ax=axes, fraction=0.046, label="share of the true class")
    return telemetry.save_figure(figure, Path(folder) / "confusion.png")
