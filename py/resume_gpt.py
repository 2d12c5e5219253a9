"""Continue a GPT run from its newest good checkpoint, bit for bit as if it had never stopped.

    python py/resume_gpt.py                                     # the newest unfinished run under runs/ or /kaggle/input
    python py/resume_gpt.py --source runs/gpt
    python py/resume_gpt.py --source /kaggle/input/my-notebook --run_folder runs/gpt

Settings come from the checkpoint. Those that leave the course of the training alone may be replaced; others are refused.
"""
import dataclasses
import shutil
import sys
from pathlib import Path

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import checkpoint as ckpt
import telemetry
import token_data
import train_gpt
from runtime import UserError
from settings import nearest_name, require

SEARCHED = ("runs", "/kaggle/input")

# What may differ from the saved run: where things lie, what runs it, and how often one looks. Anything else would make
# the continued run another run.
HARMLESS = ("data_folder", "run_folder", "stop_at", "max_minutes", "micro_batch", "attention", "recompute", "log_every",
            "eval_every", "save_every", "save_minutes", "keep_checkpoints", "sample_tokens", "log_with", "profile_steps",
            "platform", "processes", "precision")


def find_runs(source: str | Path | None = None) -> list[Path]:
    """Folders that hold checkpoints, under `source` or under the usual places; sorted by name.

    A source that is itself a run folder is the only one. Raises UserError when there are none.
    """
    roots = [Path(source)] if source else [Path(root) for root in SEARCHED]
    runs = {path.parent for root in roots if root.is_dir() for path in root.rglob("step_*") if path.is_dir()}
    if not runs:
        raise UserError(f"No run with a checkpoint was found under {' or '.join(map(str, roots))}: train first, or attach"
                        " the output of the earlier notebook version as an input and give its folder as source.")
    return sorted(runs)


def choose_run(source: str | Path | None = None) -> tuple:
    """(checkpoint, run folder) of the unfinished run that got furthest; (checkpoint, folder) of a finished one otherwise.

    Raises UserError when no run holds a good checkpoint.
    """
    found = [(newest, run) for run in find_runs(source) if (newest := ckpt.find_newest(run))]
    if not found:
        raise UserError("Runs were found, but none of their checkpoints is usable (the reasons are above): start anew.")
    found.sort(key=lambda pair: (not is_finished(pair[0]), pair[0].step))
    for newest, run in found[:-1]:
        print(f"other run: {run} at step {newest.step}" + (", finished" if is_finished(newest) else ""))
    return found[-1]


def is_finished(newest: ckpt.Checkpoint) -> bool:
    return newest.step >= newest.state()["config"]["max_steps"]


def continued_config(newest: ckpt.Checkpoint, run: Path, changes: dict) -> train_gpt.TrainConfig:
    """The saved configuration with harmless changes applied. Raises UserError with the list of those that are not."""
    saved = newest.state()["config"]
    known = [field.name for field in dataclasses.fields(train_gpt.TrainConfig)]
    for name in changes:
        require(name in known, f"setting {name!r} is not known{nearest_name(name, known)}.")
    refused = [f"{name} ({saved[name]!r} -> {value!r})" for name, value in changes.items()
               if name not in HARMLESS and value != saved[name]]
    require(not refused, f"A resumed run cannot change {', '.join(refused)}: that would be another training;"
            " start a new run for it.")
    where = {"platform": "auto", "processes": 0, "stop_at": 0, "run_folder": str(run), "resume_from": str(newest.path)}
    return train_gpt.TrainConfig(**{**saved, **where, **changes})


def resume(source: str | Path | None = None, platform: rt.Platform | None = None, /, **changes) -> Path:
    """Find, verify, continue. Returns the run folder.

    source: a run folder or a folder above runs; None for the usual places. A run in a read-only place (the output of an
    earlier notebook version) continues in `runs/<its name>`: its log is copied, its checkpoint is read where it lies.
    Says "already finished" and trains nothing when the run is complete.
    """
    newest, run = choose_run(source)
    if is_finished(newest):
        print(f"{run} is already finished at step {newest.step}: nothing to do")
        return run
    if "run_folder" not in changes and not writable(run):
        changes["run_folder"] = str(Path("runs") / run.name)
    config = continued_config(newest, run, changes)
    check_data(newest, config)
    print(f"resuming {run} at step {newest.step} of {config.max_steps}"
          + (f", into {config.run_folder}" if Path(config.run_folder) != run else ""))
    if Path(config.run_folder) != run:
        take_over_log(run, Path(config.run_folder))
    return train_gpt.launch(config, platform)


def writable(folder: Path) -> bool:
    """Tried, not asked: root may write where the permission bits say no, and a read-only mount says yes to neither."""
    probe = folder / ".write_probe"
    try:
        probe.touch()
        probe.unlink(missing_ok=True)       # under `accelerate launch` another rank may have been faster
    except OSError:
        return False
    return True


def check_data(newest: ckpt.Checkpoint, config: train_gpt.TrainConfig) -> None:
    shards = token_data.open_shards(config.data_folder, config.T, config.vocab_size or None)
    require(train_gpt.data_identity(shards) == newest.state()["data"],
            f"The shards in {config.data_folder} are not those that the run was trained on: give the folder of"
            " the original ones as data_folder.")


def take_over_log(run: Path, folder: Path) -> None:
    require(not any(folder.glob("step_*")), f"{folder} already holds another run: give a free run_folder.")
    folder.mkdir(parents=True, exist_ok=True)
    if (run / telemetry.LOG_NAME).exists():
        shutil.copy(run / telemetry.LOG_NAME, folder / telemetry.LOG_NAME)


def main(arguments: list | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    source = None
    if "--source" in arguments:
        at = arguments.index("--source")
        require(at + 1 < len(arguments), "--source needs a folder.")
        source = arguments[at + 1]
        del arguments[at:at + 2]
    changes = train_gpt.settings_from_command_line(arguments)
    require(changes.pop("preset") == "auto", "A resumed run takes its settings from the checkpoint: leave preset out.")
    resume(source, rt.patch_environment(changes.get("platform", "auto")), **changes)


if __name__ == "__main__":
    rt.run_main(main)
