"""Token shards as training data: verify them, say which window comes when, cut out batches. numpy only.

    shards = open_shards("data/shards", T=1024)                                 # memory mapped, nothing is loaded
    x, y = train_batch(shards.train, seed=1, step=7, global_batch=32, rows=slice(0, 8))
    x, y = shards.val.windows_at(eval_windows(shards.val, 64))

A shard folder, made by data_prep/prepare.py, holds manifest.json (written last) and raw little-endian train_00000.bin,
val_00000.bin, ... The files of nanoGPT, llm.c and build-nanogpt are read as they are (foreign_shards.py). A window is
T+1 tokens: T inputs, and the same shifted by one as targets. Windows start every T tokens and never cross a shard.

The order of training is a pure function of (seed, position), so a run's place in the data is one integer, the number of
windows seen. It is the same for any number of processes, and nothing has to be saved or replayed to resume.
"""
import functools
import hashlib
import json
import mmap
import os
import time
from operator import index       # int() would take "12" and 1.5 as well
from pathlib import Path

import numpy as np

import foreign_shards
from runtime import UserError

FORMAT, VERSION = "gpt-token-shards", 1
HOW_TO_PREPARE = "make it with data_prep/prepare.py"


# ---- the folder and its manifest -------------------------------------------------------------------------------------

def dtype_for(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every id: a cast to a smaller one wraps ids around silently."""
    return "uint16" if vocab_size <= 2 ** 16 else "uint32"


def read_manifest(folder) -> dict:
    """The manifest of a finished shard folder, its fields and the sizes of its files checked.

    For token files that other projects made, what a manifest would say: see foreign_shards.py. Raises UserError (one
    sentence) for a folder that is missing, unfinished, of an unknown kind, damaged or cut short.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise UserError(f"There is no shard folder {folder}: {HOW_TO_PREPARE}, or correct the path.")
    path = folder / "manifest.json"
    if not os.path.isfile(path):
        if foreign := foreign_shards.describe(folder):
            return foreign
        raise UserError(f"{folder} holds no manifest.json, so it is no finished shard folder, and no token files of "
                        f"nanoGPT, llm.c or .npy: {HOW_TO_PREPARE}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): prepare the data again.") from error
    if not isinstance(manifest, dict) or (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise UserError(f"{path} does not describe {FORMAT} version {VERSION}: prepare the data again with this "
                        "project's data_prep/prepare.py.")
    try:
        _check_fields(folder, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): prepare the data again.") from error
    return manifest


def _check_fields(folder: Path, manifest: dict) -> None:
    ids, separator = index(manifest["vocab_size"]), index(manifest["separator"])
    if manifest["dtype"] != dtype_for(ids):
        raise ValueError(f"dtype {manifest['dtype']} with {ids} ids")
    if not 0 <= separator < ids:
        raise ValueError(f"separator {separator} with {ids} ids")
    str(manifest["encoding"]), dict(manifest["reference"])
    for name in ("train", "val"):
        split = manifest["splits"][name]
        tokens = sum(index(shard["tokens"]) for shard in split["shards"])
        if index(split["tokens"]) != tokens or index(split["bytes"]) < min(1, tokens):
            raise ValueError(f"the counts of {name} do not add up")
        for shard in split["shards"]:
            _check_shard(folder, shard, np.dtype(manifest["dtype"]).itemsize)


def _check_shard(folder: Path, shard: dict, itemsize: int) -> None:
    str(shard["sha256"]), index(shard["max_id"])
    if Path(shard["file"]).name != shard["file"]:
        raise ValueError(f"{shard['file']!r} is not the name of a file in the folder")
    path, expected = folder / shard["file"], shard["tokens"] * itemsize
    if not os.path.isfile(path):
        raise UserError(f"{path} is missing: copy the whole shard folder again, or prepare the data again.")
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes where its manifest says {expected:,}: "
                        "copy the whole shard folder again, or prepare the data again.")


def verify_hashes(folder) -> None:
    """Read every shard once and compare its SHA-256 and largest id with the manifest; says how far it is every 5 s.

    Raises UserError naming the first shard that differs, and for all that read_manifest refuses.
    """
    folder, manifest = Path(folder), read_manifest(folder)
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    total = sum(shard["tokens"] * stored_dtype(manifest, shard).itemsize for shard in shards)
    done, said = 0, time.monotonic()
    for shard in shards:
        digest, largest, dtype = hashlib.sha256(), -1, stored_dtype(manifest, shard)
        with open(folder / shard["file"], "rb") as stream:
            stream.seek(shard.get("offset", 0))
            while block := stream.read(2 ** 23):
                digest.update(block)
                largest = max(largest, int(np.frombuffer(block, dtype).max()))
                done += len(block)
                if time.monotonic() - said > 5:
                    said = time.monotonic()
                    print(f"verifying shards: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", flush=True)
        if digest.hexdigest() != shard["sha256"] or largest != shard["max_id"]:
            raise UserError(f"{folder / shard['file']} is not what was written (its SHA-256 or largest id differs from "
                            "the manifest): copy the whole shard folder again, or prepare the data again.")


def stored_dtype(manifest: dict, shard: dict) -> np.dtype:
    return np.dtype(shard.get("dtype", manifest["dtype"])).newbyteorder("<")


class ShardMap:
    """The ids of one shard, memory mapped. `release` gives the memory of what was read back; the mapping stays."""

    def __init__(self, path: Path, dtype: np.dtype, offset: int, tokens: int):
        try:
            with open(path, "rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
        self.ids = np.frombuffer(self._map, dtype, tokens, offset)

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):      # Linux: the pages stay in the system's cache while there is room
            self._map.madvise(mmap.MADV_DONTNEED)


# ---- windows of tokens -----------------------------------------------------------------------------------------------

RELEASE_EVERY = 1024        # windows: a first touch maps up to 64 KiB around it, so they hold at most 64 MiB


class TokenSplit:
    """One split, memory mapped. `tokens`, text `bytes`, and `windows` of T+1 tokens, numbered through the shards."""

    def __init__(self, folder, name: str, manifest: dict, T: int):
        entry = manifest["splits"][name]
        self.name, self.T = name, T
        self.tokens, self.bytes = entry["tokens"], entry["bytes"]
        shards = [shard for shard in entry["shards"] if shard["tokens"] > T]      # an empty file cannot be mapped
        self._shards = [ShardMap(Path(folder) / shard["file"], stored_dtype(manifest, shard), shard.get("offset", 0),
                                 shard["tokens"]) for shard in shards]
        # the last target of a window is the first input of the next: n tokens hold (n - 1) // T windows
        self._first_window = np.cumsum([0] + [(shard["tokens"] - 1) // T for shard in shards])
        self.windows, self._unreleased = int(self._first_window[-1]), 0

    def windows_at(self, indices) -> tuple[np.ndarray, np.ndarray]:
        """Inputs x and targets y of the B windows with these numbers: two int32 arrays (B, T), y shifted by one.

        Raises IndexError for a number outside 0..windows-1.
        """
        indices = np.asarray(indices, dtype=np.int64).reshape(-1)
        if indices.size and not (0 <= indices.min() and indices.max() < self.windows):
            raise IndexError(f"{self.name} has windows 0..{self.windows - 1}, not {indices.min()}..{indices.max()}")
        block = np.empty((len(indices), self.T + 1), dtype=np.int32)
        which = np.searchsorted(self._first_window, indices, side="right") - 1
        for row, (shard, window) in enumerate(zip(which, indices)):
            start = (window - self._first_window[shard]) * self.T
            block[row] = self._shards[shard].ids[start:start + self.T + 1]
        self._release(len(indices))
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])


    def _release(self, windows: int) -> None:
        """Keep resident memory flat over a run, whatever the size of the shards."""
        self._unreleased += windows
        if self._unreleased >= RELEASE_EVERY:
            self._unreleased = 0
            for shard in self._shards:
                shard.release()


class TokenShards:
    """A verified shard folder: `train` and `val` splits, and what the manifest says about the data."""

    def __init__(self, folder, manifest: dict, T: int):
        self.manifest = manifest
        self.vocab_size, self.separator = manifest["vocab_size"], manifest["separator"]
        self.encoding, self.reference = manifest["encoding"], manifest["reference"]
        self.train, self.val = (TokenSplit(folder, name, manifest, T) for name in ("train", "val"))

    def bytes_per_token(self, split: str) -> float | None:
        """Text bytes a token of 'train' or 'val', separators counted: nats a token / this = nats a byte.

        None where nobody knows: files of other projects do not say it.
        """
        split = getattr(self, split)
        return split.bytes / split.tokens if split.bytes else None

    def per_byte(self, val_loss: float) -> float | None:
        """A loss on val, in nats per token, as nats per byte of text; None where bytes_per_token is."""
        return val_loss / self.bytes_per_token("val") if self.val.bytes else None


def open_shards(folder, T: int, vocab_size: int | None = None) -> TokenShards:
    """Open a shard folder for windows of T tokens and a model with vocab_size ids (None: as many as the data's).

    All that is cheap is checked here, before a process starts. Raises UserError, one sentence each: what read_manifest
    refuses, an id that the model does not have, a split without a single window.
    """
    if T < 1:
        raise UserError(f"T={T} is no window length: T must be at least 1 token.")
    manifest = read_manifest(folder)
    _check_ids(folder, manifest, vocab_size or manifest["vocab_size"])
    shards = TokenShards(folder, manifest, T)
    for split in (shards.train, shards.val):
        if split.windows < 1:
            in_one = " in one shard" if split.tokens > T else ""
            raise UserError(f"{split.name} has {split.tokens:,} tokens, needs at least {T + 1:,}{in_one} for T={T}: "
                            f"use a smaller T or more data than {folder} holds.")
    return shards


def _check_ids(folder, manifest: dict, vocab_size: int) -> None:
    """On a TPU an embedding looked up with an id that it does not have raises nothing and returns garbage."""
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            if not 0 <= shard["max_id"] < vocab_size:
                raise UserError(f"{Path(folder) / shard['file']} holds token id {shard['max_id']:,} but the model has "
                                f"only {vocab_size:,} ids: set vocab_size to at least {manifest['vocab_size']:,}, or "
                                "use shards of another encoding.")


# ---- the order of windows --------------------------------------------------------------------------------------------

ROUNDS = 12             # a Feistel network looks random after 4 on large numbers, numbers of two bits need more
GOLDEN, MIX_1, MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def window_order(seed: int, first: int, count: int, windows: int) -> np.ndarray:
    """The windows (0..windows-1) at positions first..first+count-1 of the endless training order: int64 (count,).

    Every `windows` positions are one epoch, and each epoch is its own permutation of all windows. Costs O(count) from
    any position. The same for ever: a changed order would break the resume of every run.
    """
    return _windows_at_positions(seed, np.arange(first, first + count, dtype=np.uint64), windows)


def _windows_at_positions(seed: int, positions: np.ndarray, windows: int) -> np.ndarray:
    """A keyed permutation of 2^(2*half) >= windows numbers, applied until it lands inside: that stays one-to-one."""
    epochs, value = np.divmod(positions, np.uint64(windows))
    keys = _mix(_mix(np.full(1, seed % 2 ** 64, dtype=np.uint64)) + epochs * GOLDEN)
    half = np.uint64(max(1, ((windows - 1).bit_length() + 1) // 2))
    value = _feistel(value, keys, half)
    while (outside := value >= windows).any():
        value[outside] = _feistel(value[outside], keys[outside], half)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    """One-to-one on 0..2^(2*half)-1 whatever _mix does: a round changes one half by the other, so it can be undone."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        keys = _mix(keys + GOLDEN)
        left, right = right, left ^ (_mix(keys ^ right) & mask)
    return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit moves every output bit. uint64 in and out, overflow is intended."""
    x = (x ^ (x >> np.uint64(30))) * MIX_1
    x = (x ^ (x >> np.uint64(27))) * MIX_2
    return x ^ (x >> np.uint64(31))


def train_batch(split: TokenSplit, seed: int, step: int, global_batch: int, rows) -> tuple[np.ndarray, np.ndarray]:
    """The given rows (a slice, or numbers in 0..global_batch-1) of the global batch of `step`: x, y, int32 (rows, T).

    A row's position in the training order is step * global_batch + row, so any number of ranks and micro-steps, each
    with its own rows, makes up the same batch.
    """
    rows = np.arange(global_batch)[rows] if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64).reshape(-1)
    if rows.size and not (0 <= rows.min() and rows.max() < global_batch):
        raise IndexError(f"rows {rows.min()}..{rows.max()} of a global batch of {global_batch}")
    return split.windows_at(_window_numbers(seed, rows + step * global_batch, split.windows))


ORDER_BLOCK = 1024      # positions whose windows are computed at once: a few at a time cost as much in numpy's calls


def _window_numbers(seed: int, positions: np.ndarray, windows: int) -> np.ndarray:
    """As _windows_at_positions, from blocks that are kept."""
    numbers, places = np.divmod(positions, ORDER_BLOCK)
    found = np.empty(len(positions), dtype=np.int64)
    for number in dict.fromkeys(numbers.tolist()):
        chosen = numbers == number
        found[chosen] = _order_block(seed, number, windows)[places[chosen]]
    return found


@functools.lru_cache(maxsize=16)
def _order_block(seed: int, number: int, windows: int) -> np.ndarray:
    return window_order(seed, number * ORDER_BLOCK, ORDER_BLOCK, windows)


def eval_windows(split: TokenSplit, count: int) -> np.ndarray:
    """At most `count` window numbers, evenly spread and always the same, so that two losses can be compared: int64."""
    count = min(count, split.windows)
    return (2 * np.arange(count, dtype=np.int64) + 1) * split.windows // (2 * count) if count > 0 else np.arange(0)
