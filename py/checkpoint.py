"""Checkpoints that survive a kill: written beside, verified by a manifest, renamed into place, found again anywhere.

A run folder holds `step_00001234/` folders (the newest few) and `best/`, each with

    model.safetensors       every parameter once, fp32, on the CPU, under the plain module's names
    optimizer.safetensors   AdamW's state, under `<kind>/<parameter name>`
    state.json              step, config, best validation loss, data identity: plain JSON, nothing to unpickle
    manifest.json           size and SHA-256 of the others; written last

Nothing in it depends on the number of processes or on the device.
"""
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from runtime import UserError

FORMAT_VERSION = 1
BYTES_PER_PARAMETER = 12        # the weight and AdamW's two averages, fp32
MANIFEST, STATE, MODEL, OPTIMIZER = "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint folder."""
    path: Path
    step: int

    def state(self) -> dict:
        return json.loads((self.path / STATE).read_text())

    def model(self) -> dict:
        """{parameter name: fp32 CPU tensor}"""
        return load_file(self.path / MODEL)

    def optimizer(self) -> dict:
        """{'<kind>/<parameter name>': CPU tensor}"""
        return load_file(self.path / OPTIMIZER)


def step_folder(step: int) -> str:
    return f"step_{step:08}"


def save(folder: str | Path, name: str, step: int, model: dict, optimizer: dict, state: dict) -> Path:
    """Write a checkpoint as `folder/name`, replacing one of that name only once the new one is complete and verified.

    model, optimizer: {name: CPU tensor}. state: plain JSON values. Raises OSError when the disk refuses, or gives back
    other bytes than it was given; whatever was in `folder` before is then still there.
    """
    folder = Path(folder)
    partial, target, old = (folder / f"{prefix}{name}" for prefix in (".partial_", "", ".old_"))
    tidy(folder)
    partial.mkdir(parents=True)
    try:
        files = {MODEL: save_file(model, partial / MODEL), OPTIMIZER: save_file(optimizer, partial / OPTIMIZER),
                 STATE: save_text(json.dumps({"step": step, **state}, indent=1), partial / STATE)}
        save_text(json.dumps({"version": FORMAT_VERSION, "step": step, "files": files}, indent=1), partial / MANIFEST)
        flush_to_disk(partial)
        reason = what_is_wrong(partial)
        if reason:
            raise OSError(errno.EIO, f"read back after writing, {reason}")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _put_in_place(partial, target, old)
    return target


def copy(source: str | Path, folder: str | Path, name: str) -> Path:
    """Put a complete checkpoint also at `folder/name`, by hard links where the file system has them: no second copy."""
    partial, target, old = (Path(folder) / f"{prefix}{name}" for prefix in (".partial_", "", ".old_"))
    tidy(folder)
    shutil.copytree(source, partial, copy_function=_link_or_copy)
    _put_in_place(partial, target, old)
    return target


def tidy(folder: str | Path) -> None:
    """Remove what cut-off saves left in a run folder; a complete one, cut off between two renames, comes back."""
    for partial in Path(folder).glob(".partial_*"):
        shutil.rmtree(partial, ignore_errors=True)
    for old in Path(folder).glob(".old_*"):
        target = old.with_name(old.name.removeprefix(".old_"))
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, target)


def _link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _put_in_place(partial: Path, target: Path, old: Path) -> None:
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    flush_to_disk(target.parent)
    shutil.rmtree(old, ignore_errors=True)


SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def save_file(tensors: dict, path: Path) -> dict:
    """Write {name: CPU tensor} as a safetensors file, down to the disk; returns its {'bytes', 'sha256'}.

    The hash is that of the memory, taken on the way: a disk that writes something else cannot go unseen. The library's
    own writer gives no such hash, and reports a full disk as an error of a class of its own. Raises OSError.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)         # the format asks for tensors that begin at a multiple of eight
    parts = (tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values())
    return _write(path, len(text).to_bytes(8, "little"), text, *parts)


def save_text(text: str, path: Path) -> dict:
    """Write a text file, down to the disk; returns its {'bytes', 'sha256'}. Raises OSError."""
    return _write(path, text.encode())


def _write(path: Path, *parts) -> dict:
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def describe(path: Path) -> dict:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def flush_to_disk(path: Path) -> None:
    """fsync a folder: a rename may otherwise reach the disk before the names it speaks of."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def what_is_wrong(path: str | Path) -> str | None:
    """Why the folder is no good checkpoint, in a few words; None when every size and hash is right."""
    path = Path(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, _ = manifest["files"], int(manifest["step"])
    except FileNotFoundError:
        return "it has no manifest: the save was cut off"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return "its manifest cannot be read"
    if manifest.get("version") != FORMAT_VERSION:
        return f"it has format version {manifest.get('version')}, this code reads {FORMAT_VERSION}"
    if not {MODEL, OPTIMIZER, STATE} <= set(files):
        return "its manifest does not list every file"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected.get("bytes"):
            return f"{name} has {file.stat().st_size} bytes instead of {expected.get('bytes')}"
        if describe(file) != expected:
            return f"{name} does not have the content that was written"
    return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in this folder, verified. Raises UserError with the reason when it is not a good one."""
    reason = what_is_wrong(path)
    if reason:
        raise UserError(f"{path} is not a usable checkpoint: {reason}; choose another one, or the run folder to take the"
                        " newest good one.")
    return Checkpoint(Path(path), json.loads((Path(path) / MANIFEST).read_text())["step"])


def find_newest(run_folder: str | Path, report=print) -> Checkpoint | None:
    """The good checkpoint with the highest step in a run folder; says which were skipped and why. None without any.

    Where a save was cut off between its two renames, the complete older folder counts too.
    """
    folders = [p for p in Path(run_folder).glob("*step_*") if p.is_dir() and not p.name.startswith(".partial_")]
    for path in sorted(folders, key=lambda p: p.name.removeprefix(".old_"), reverse=True):
        reason = what_is_wrong(path)
        if reason is None:
            return open_checkpoint(path)
        report(f"skipped {path}: {reason}")
    return None


def remove_old(run_folder: str | Path, keep: int) -> None:
    """Remove the steps before the `keep` newest good ones, each verified now. Call it after a save, never before.

    A damaged one counts for nothing: otherwise it would take the place of a good one.
    """
    steps = (path for path in Path(run_folder).glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name))
    good = 0
    for path in sorted(steps, reverse=True):
        if good >= keep:
            shutil.rmtree(path, ignore_errors=True)
        elif what_is_wrong(path) is None:
            good += 1


# ---- room, and one run a folder ------------------------------------------------------------------------------------

def require_room(run_folder: str | Path, parameters: int, keep: int) -> None:
    """Raise UserError unless the disk has room for all that a run writes: `keep` steps, the best, and one in progress.

    What the folder already holds counts as written. The folder need not exist yet.
    """
    one = BYTES_PER_PARAMETER * parameters
    needed = max(one, one * (keep + 2) - bytes_held(run_folder))
    free = free_bytes(run_folder)
    if free < needed:
        raise UserError(f"{run_folder} needs {size_text(needed)} for {keep + 2} checkpoints of {size_text(one)} ({keep}"
                        f" to keep, the best, one in progress), and only {size_text(free)} are free there: make room,"
                        " or give a run_folder on a larger disk.")


def require_room_for_one(run_folder: str | Path, parameters: int) -> None:
    """Raise OSError unless one more checkpoint fits. Asked before it is written: a full disk stops other things too."""
    tidy(run_folder)
    needed, free = BYTES_PER_PARAMETER * parameters, free_bytes(run_folder)
    if free < needed:
        raise OSError(errno.ENOSPC, f"it needs {size_text(needed)} and only {size_text(free)} are free")


def free_bytes(folder: str | Path) -> int:
    """What may still be written below a folder, which need not exist."""
    folder = Path(folder).resolve()
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def bytes_held(run_folder: str | Path) -> int:
    """Bytes of the checkpoints in a run folder; files that share their content by hard links count once."""
    files = [p.stat() for name in ("step_*", "best") for p in Path(run_folder).glob(f"{name}/*") if p.is_file()]
    return sum({stat.st_ino: stat.st_size for stat in files}.values())


def size_text(size: float) -> str:
    """1493000000 -> '1.49 GB', 480000 -> '0.5 MB'."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def unused_run_folder(wanted: str | Path) -> Path:
    """`wanted`, or `wanted-2`, ... when it holds what a run kept: a second run never writes over the first."""
    folder, number = Path(wanted), 1
    while any(folder.glob("step_*")) or (folder / "best").exists() or any(folder.glob("model*")):
        number += 1
        folder = Path(f"{wanted}-{number}")
    if number > 1:
        print(f"{wanted} already holds a run, which stays as it is: this one goes to {folder}")
    return folder


SECONDS_TO_BE_GONE = 5


@contextlib.contextmanager
def only_run_in(run_folder: str | Path):
    """Make the run folder and hold it for one run. Raises UserError when that fails, or another run trains in it.

    The system lets the lock go when the last process of the run is gone, however it ended. One that was killed takes a
    moment to go: its memory is freed and its last write ended first. So a held lock is asked for again, for
    SECONDS_TO_BE_GONE, before it counts as another run's.
    """
    try:
        Path(run_folder).mkdir(parents=True, exist_ok=True)
        lock = (Path(run_folder) / ".lock").open("w")
    except OSError as error:
        raise UserError(f"The run folder {run_folder} cannot be written ({error.strerror}): give another"
                        " run_folder.") from None
    with lock:
        give_up = time.monotonic() + SECONDS_TO_BE_GONE
        while not _locked(lock):
            if time.monotonic() > give_up:
                raise UserError(f"Another run is training in {run_folder}: wait for its end, or give another run_folder.")
            time.sleep(0.05)
        yield


def _locked(file) -> bool:
    """Whether this process holds the file now. True too on a file system without locks: nothing is lost but the check."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def run_of(config, is_main: bool):
    """Hold `config.run_folder` for this run, and keep the settings there as config.json.

    is_main: under `accelerate launch` or torchrun every rank comes here, and the main one alone does it. Raises
    UserError as `only_run_in` does.
    """
    if not is_main:
        yield
        return
    with only_run_in(config.run_folder):
        (Path(config.run_folder) / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        yield


# ---- writing beside the training -----------------------------------------------------------------------------------

NO_ERROR_NUMBER = 255        # of a failure that is not the system's


class Writer:
    """Runs one job at a time in a thread, beside the training. On all but the main process it does nothing.

    with Writer(is_main) as writer:
        writer.start(save, ...)     # waits for the job before, if it still runs; the arguments must not change any more
        writer.wait()               # afterwards all is on disk, or `failure` says why not

    A failure stays until the run ends: `failure_code` is a number, so that a reduction can carry it to all ranks.
    """

    def __init__(self, active: bool = True, clock=time.monotonic):
        self.active, self.clock = active, clock
        self.failure, self.thread, self.started = None, None, clock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.wait()

    def start(self, job, *arguments) -> None:
        if self.active:
            self.wait()
            self.started = self.clock()
            self.thread = threading.Thread(target=self._run, args=(job, *arguments), name="checkpoint writer")
            self.thread.start()

    def wait(self) -> None:
        if self.thread:
            self.thread.join()
            self.thread = None

    def is_due(self, minutes: float) -> bool:
        """Whether the last job began `minutes` ago or earlier; never for 0."""
        return self.active and 0 < 60 * minutes <= self.clock() - self.started

    def failure_code(self) -> int:
        """0: none. Otherwise the system's error number, or NO_ERROR_NUMBER."""
        return (getattr(self.failure, "errno", None) or NO_ERROR_NUMBER) if self.failure else 0

    def _run(self, job, *arguments) -> None:
        try:
            job(*arguments)
        except BaseException as error:
            self.failure = error


# ---- a model and an optimizer, to and from plain CPU tensors -----------------------------------------------------------

def model_tensors(model) -> dict:
    """{name: fp32 CPU copy} of every parameter of the innermost module, in one place whatever wraps it."""
    return {name: host_copy(p, torch.float32) for name, p in unwrap(model).named_parameters()}


def host_copy(tensor, dtype=None):
    """A copy on the CPU that later training steps leave alone: exactly one, wherever the tensor lies."""
    return tensor.detach().to("cpu", dtype or tensor.dtype, copy=True).contiguous()


def unwrap(model):
    """The module itself, without the shells of compile or DDP, which would leak into the names."""
    while hasattr(model, "_orig_mod") or type(model).__name__ == "DistributedDataParallel":
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def load_model(model, tensors: dict) -> None:
    """Copy tensors into the model. Raises UserError that lists what differs: a name or a shape, in either direction."""
    own = dict(unwrap(model).named_parameters())
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is not in the model" for name in tensors.keys() - own.keys()]
    wrong += [f"{name} has shape {tuple(tensors[name].shape)}, the model {tuple(own[name].shape)}"
              for name in own.keys() & tensors.keys() if tensors[name].shape != own[name].shape]
    if wrong:
        raise UserError(f"The checkpoint does not match the model in {len(wrong)} tensors: {'; '.join(sorted(wrong)[:4])}:"
                        " use the configuration that it was saved with.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(optimizer, model) -> dict:
    """{'<kind>/<name>': CPU copy} of the optimizer's state, under the parameters' names instead of their numbers."""
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    if hasattr(optimizer, "host_states"):
        states = optimizer.host_states()
    else:
        states = {p: {kind: host_copy(value) for kind, value in state.items()} for p, state in optimizer.state.items()}
    return {f"{kind}/{names[id(p)]}": value for p, state in states.items() for kind, value in state.items()}


def load_optimizer(optimizer, model, tensors: dict | None = None) -> None:
    """Set AdamW's state from tensors, or to its beginning when there are none. Call it after the model is on its device.

    Also at the very start: AdamW would create its state inside step one, which makes steps one and two two programs.
    Raises UserError when a parameter's state is missing.
    """
    names = {id(p): name for name, p in unwrap(model).named_parameters()}
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    if tensors is None:
        tensors = {f"{kind}/{names[id(p)]}": torch.zeros(p.shape if kind != "step" else ())
                   for p in ordered for kind in ("step", "exp_avg", "exp_avg_sq")}
    state = {number: {key.split("/")[0]: tensors[key] for key in _state_keys(tensors, names[id(p)])}
             for number, p in enumerate(ordered)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _state_keys(tensors: dict, name: str) -> list:
    keys = [f"{kind}/{name}" for kind in ("step", "exp_avg", "exp_avg_sq")]
    missing = [key for key in keys if key not in tensors]
    if missing:
        raise UserError(f"The checkpoint has no optimizer state {missing[0]}: it was saved from another model.")
    return keys
