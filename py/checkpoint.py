"""Checkpoints that survive a kill: written beside, verified by a manifest, renamed into place, found again anywhere.

A run folder holds `step_00001234/` folders (the newest few) and `best/`, each with

    model.safetensors       every parameter once, fp32, on the CPU, under the plain module's names
    optimizer.safetensors   AdamW's state, under `<kind>/<parameter name>`
    state.json              step, config, best validation loss, data identity: plain JSON, nothing to unpickle
    manifest.json           size and SHA-256 of the others; written last

Nothing in it depends on the number of processes or on the device.
"""
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from runtime import UserError

FORMAT_VERSION = 1
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
    """Write a checkpoint as `folder/name`, replacing one of that name only once the new one is complete.

    model, optimizer: {name: CPU tensor}. state: plain JSON values. Raises OSError when the disk refuses; whatever was in
    `folder` before is then still there.
    """
    folder = Path(folder)
    partial, target, old = (folder / f"{prefix}{name}" for prefix in (".partial_", "", ".old_"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(model, partial / MODEL)
        save_file(optimizer, partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        files = {file: describe(partial / file) for file in (MODEL, OPTIMIZER, STATE)}
        (partial / MANIFEST).write_text(json.dumps({"version": FORMAT_VERSION, "step": step, "files": files}, indent=1))
        for file in (*files, MANIFEST):
            flush_to_disk(partial / file)
        flush_to_disk(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _put_in_place(partial, target, old)
    return target


def copy(source: str | Path, folder: str | Path, name: str) -> Path:
    """Put a complete checkpoint also at `folder/name`, by hard links where the file system has them: no second copy."""
    partial, target, old = (Path(folder) / f"{prefix}{name}" for prefix in (".partial_", "", ".old_"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, partial, copy_function=_link_or_copy)
    _put_in_place(partial, target, old)
    return target


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


def describe(path: Path) -> dict:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder: a rename may otherwise reach the disk before the data it names."""
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
    """Keep the `keep` newest complete steps. Call it after a save, never before."""
    finished = sorted(p for p in Path(run_folder).glob("step_*") if (p / MANIFEST).exists())
    for path in finished[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


# ---- a model and an optimizer, to and from plain CPU tensors -----------------------------------------------------------

def model_tensors(model) -> dict:
    """{name: fp32 CPU copy} of every parameter of the innermost module, in one place whatever wraps it."""
    return {name: p.detach().cpu().float().clone().contiguous() for name, p in unwrap(model).named_parameters()}


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
    return {f"{kind}/{names[id(p)]}": value.detach().cpu().clone().contiguous()
            for p, state in optimizer.state.items() for kind, value in state.items()}


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
