"""Token shards on disk: written beside the target, complete or not there at all.

    with unfinished_folder("data/shards", request) as folder:       # a temporary folder beside it
        train = SplitWriter(folder, "train", vocab_size=257)
        train.add(ids, text_bytes=4000, documents=3)
        save_progress(folder, request, {"train": train.state(), ...})   # now and then
        write_manifest(folder, {..., "splits": {"train": train.finish(), ...}})
                                                                    # here it is renamed to data/shards

A preparation that is killed leaves only a temporary folder. The same request goes on from the progress saved there,
another one removes it. Two at once each write their own, and the first to finish wins. The format is the one that
token_data.py reads.
"""
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Iterator

import numpy as np

from runtime import UserError
from token_data import FORMAT, VERSION, dtype_for, read_manifest

SHARD_TOKENS = 100_000_000      # 200 MB as uint16
PROGRESS = "progress.json"


class SplitWriter:
    """Writes the ids of one split into shards of shard_tokens, the last one shorter, and counts what goes by."""

    def __init__(self, folder, name: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.name, self.vocab_size, self.shard_tokens = Path(folder), name, vocab_size, shard_tokens
        self.dtype = np.dtype(dtype_for(vocab_size)).newbyteorder("<")
        self.tokens = self.bytes = self.documents = 0
        self._shards, self._stream = [], None

    def add(self, ids: np.ndarray, text_bytes: int, documents: int) -> None:
        """Append ids, a one-dimensional array of integers. Raises UserError for an id that is not in the vocabulary."""
        if len(ids) and not (0 <= ids.min() and ids.max() < self.vocab_size):
            raise UserError(f"The encoding gave token ids {ids.min()}..{ids.max()}, but its vocabulary is "
                            f"0..{self.vocab_size - 1}: nothing was kept, use another encoding.")
        self.tokens += len(ids)
        self.bytes += text_bytes
        self.documents += documents
        while len(ids):
            if self._stream is None:
                self._open_shard()
            room = self.shard_tokens - self._shards[-1]["tokens"]
            self._write(ids[:room])
            ids = ids[room:]

    def finish(self) -> dict:
        """Close the last shard; what the manifest says about this split."""
        if self._stream is not None:
            self._close_shard()
        return self._counts()

    def state(self) -> dict:
        """Put all on the disk that was added so far; what `restore` needs to go on from here."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return self._counts()

    def restore(self, state: dict) -> None:
        """Go on from a state: what was written after it is cut off, what was written before is hashed again."""
        self.tokens, self.bytes, self.documents = state["tokens"], state["bytes"], state["documents"]
        self._shards = [dict(shard) for shard in state["shards"]]
        for path in self.folder.glob(f"{self.name}_*.bin"):
            if path.name not in {shard["file"] for shard in self._shards}:
                path.unlink()
        if self._shards and self._shards[-1]["tokens"] < self.shard_tokens:
            self._reopen_shard()

    def _counts(self) -> dict:
        return {"tokens": self.tokens, "bytes": self.bytes, "documents": self.documents,
                "shards": [dict(shard) for shard in self._shards]}

    def _reopen_shard(self) -> None:
        shard = self._shards[-1]
        self._stream, self._digest = open(self.folder / shard["file"], "r+b"), hashlib.sha256()
        self._stream.truncate(shard["tokens"] * self.dtype.itemsize)
        while block := self._stream.read(2 ** 20):
            self._digest.update(block)

    def _open_shard(self) -> None:
        name = f"{self.name}_{len(self._shards):05d}.bin"
        self._shards.append({"file": name, "tokens": 0, "sha256": "", "max_id": -1})
        self._stream, self._digest = open(self.folder / name, "xb"), hashlib.sha256()

    def _write(self, ids: np.ndarray) -> None:
        content, shard = ids.astype(self.dtype).tobytes(), self._shards[-1]
        self._stream.write(content)
        self._digest.update(content)
        shard["tokens"] += len(ids)
        shard["max_id"] = max(shard["max_id"], int(ids.max()))
        if shard["tokens"] == self.shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._shards[-1]["sha256"], self._stream = self._digest.hexdigest(), None


def write_manifest(folder, manifest: dict) -> dict:
    """Add format and version, write manifest.json in one go, return it. Comes last: it vouches for all the shards."""
    manifest = {"format": FORMAT, "version": VERSION, **manifest}
    path = Path(folder) / "manifest.json"
    temporary = path.with_suffix(".json.partial")
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    return manifest


# ---- the target folder -----------------------------------------------------------------------------------------------

def already_prepared(out, request: dict) -> dict | None:
    """The manifest in `out` if this very request was prepared there, None if `out` is free.

    Raises UserError, and leaves all as it is, for a folder that holds anything else.
    """
    out = Path(out)
    if os.path.exists(out) and not os.path.isdir(out):
        raise UserError(f"{out} is a file, not a folder: choose another place for the shards.")
    try:
        names = os.listdir(out)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"The folder {out} cannot be used ({error.strerror}): choose another one.") from error
    if not names:
        return None
    if "manifest.json" not in names:
        raise UserError(f"{out} holds other files and no finished shards: choose a new or an empty folder.")
    manifest = read_manifest(out)
    if manifest.get("request") != request:
        raise UserError(f"{out} already holds shards prepared with another {_differences(manifest, request)}: choose "
                        "another folder, or delete this one.")
    return manifest


def _differences(manifest: dict, request: dict) -> str:
    old = manifest.get("request") or {}
    return ", ".join(name for name in request if old.get(name) != request[name])


def check_disk(out, needed: int) -> None:
    """Raises UserError when the disk of `out` has less than `needed` bytes free."""
    place = Path(os.path.realpath(out))
    while not os.path.exists(place):
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(f"The shards need about {needed / 1e6:,.0f} MB and {place} has {free / 1e6:,.0f} MB free: make "
                        "room, choose another disk, or limit the text with max_bytes.")


def save_progress(folder, request: dict, state: dict) -> None:
    """Note what is safely on the disk, in one go: after a kill, the same request goes on from here."""
    path = Path(folder) / PROGRESS
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps({"request": request, **state}), encoding="utf-8")
    os.replace(temporary, path)


def saved_progress(folder, request: dict) -> dict | None:
    """What save_progress noted for this very request, or None."""
    try:
        progress = json.loads((Path(folder) / PROGRESS).read_text(encoding="utf-8"))
        return progress if progress.pop("request") == request else None
    except (OSError, ValueError, KeyError, TypeError):      # none, or not what was written
        return None


@contextlib.contextmanager
def unfinished_folder(out, request: dict | None = None) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to `out` at the end: a new one, or that of a killed same `request`.

    When something goes wrong it is removed, or kept where there is progress to go on from. Raises UserError when it
    cannot be written, or when `out` has been filled by another preparation meanwhile.
    """
    out = Path(os.path.realpath(out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _take_over(out, request) or _locked_folder(out)
    except OSError as error:
        raise UserError(f"Nothing can be written beside {out} ({error.strerror}): choose another folder.") from error
    try:
        yield folder
        (folder / PROGRESS).unlink(missing_ok=True)
        os.rename(folder, out)          # only onto nothing or an empty folder: the system refuses all else
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"{out} was filled by another preparation meanwhile, whose shards stay: run this again to "
                            "use them.") from error
        kept = "what is done is kept: make room and run it again" if (folder / PROGRESS).exists() else \
            "nothing was kept: make room, or choose another folder"
        raise UserError(f"The shards could not be written to {out} ({error.strerror}), {kept}.") from error
    finally:
        if not (folder / PROGRESS).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(out: Path) -> tuple[Path, int]:
    """A new folder under a lock that ends with this process. It gets its final name only when it is locked."""
    unlocked = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.new"
    unlocked.mkdir()
    lock = os.open(unlocked, os.O_RDONLY)
    with contextlib.suppress(OSError):      # some network disks cannot lock: then nothing is ever taken for abandoned
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = unlocked.with_suffix(".partial")
    unlocked.rename(folder)
    return folder, lock


def _take_over(out: Path, request: dict | None) -> tuple[Path, int] | None:
    """The folder, and a lock on it, that a killed preparation of the same request has left; all other ones are removed.

    Only a folder that nobody holds a lock on is one of a killed preparation.
    """
    taken = None
    for folder in sorted(out.parent.glob(glob.escape(f".{out.name}.") + "*.partial")):
        with contextlib.suppress(OSError):      # locked, so somebody's; or just renamed, so finished
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if taken is None and request is not None and saved_progress(folder, request):
                    taken = folder, os.dup(lock)        # a lock belongs to all copies of its descriptor
                else:
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
    return taken
