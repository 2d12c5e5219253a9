"""Notes which windows of the data each optimizer step of a run takes. For tests, in any process."""
import os
from pathlib import Path

import numpy as np

import token_data


class Windows:
    """Takes the place of token_data.train_batch, and writes (step, row, window) of all rows that this process takes."""

    def __init__(self, folder):
        self.folder, self.original = Path(folder), token_data.train_batch

    def __call__(self, split, seed, step, global_batch, rows):
        positions = np.array([row + step * global_batch for row in rows], dtype=np.uint64)
        numbers = token_data._windows_at_positions(seed, positions, split.windows)
        with (self.folder / f"windows_{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{step} {row} {number}\n" for row, number in zip(rows, numbers))
        return self.original(split, seed, step, global_batch, rows)


def windows_taken(folder) -> list:
    """(step, row, window) of all processes, in order; one that was taken twice is there twice."""
    return sorted(tuple(map(int, line.split())) for path in Path(folder).glob("windows_*.txt")
                  for line in path.read_text().splitlines())
