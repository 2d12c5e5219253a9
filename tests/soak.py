"""Kill a run again and again, damage its checkpoints, and show that nothing is lost.

    python tests/soak.py --kills 100            # a few minutes; `make soak`
    python tests/soak.py --kills 5 --steps 100  # what the test suite does

Each life of the run is a process group of its own that ends by `kill -9`, a third of them inside a save; the next life
resumes it. At the end the weights and the optimizer's state must equal those of the unbroken run bit for bit. Every
life must have begun at the newest complete checkpoint that lay there, and no step once complete may be lost again.

A life is forked from this process, which has loaded torch already: 100 lives would otherwise be mostly imports.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("py", "data_prep")]

import runtime as rt  # noqa: E402

# A checkpoint of 3 MB takes long enough to be hit while it is written, and short enough to be written often.
SETTINGS = dict(preset="tiny", platform="cpu", sample_tokens=0, n_embd=96, n_layer=2, dropout=0.1, tokens_per_step=64,
                micro_batch=1, max_steps=300, save_every=5, eval_every=50, eval_windows=8, log_every=5,
                save_minutes=0.0)
LIFE_SECONDS = 60           # a life that does neither end nor reach its kill in this time hangs: the soak fails


class Lost(Exception):
    """What must never happen, has."""


def main(arguments: list | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300, help="steps of the run")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=45, help="give up after that long")
    parser.add_argument("--folder", default="", help="where the runs lie; a temporary folder when left out")
    options = parser.parse_args(arguments)
    SETTINGS["max_steps"] = options.steps
    folder = Path(options.folder or tempfile.mkdtemp(prefix="soak_"))
    try:
        soak(options, folder)
        damage_everything(folder / "unbroken", random.Random(options.seed))
    except Lost as reason:
        print(f"FAILED: {reason} (everything is left in {folder})")
        return 1
    if not options.folder:
        shutil.rmtree(folder)
    return 0


def soak(options, folder: Path) -> None:
    """The kills, over as many runs as they take. Raises Lost."""
    rt.patch_environment("cpu")
    import accelerate, matplotlib.figure, resume_gpt    # noqa: E401, F401: loaded once, for all lives
    shards = make_shards(folder)
    chance, counts = random.Random(options.seed), Counter()
    begun, unbroken = time.monotonic(), folder / "unbroken"
    live(unbroken, shards, options.processes, folder / "unbroken.txt")
    duration = time.monotonic() - begun
    print(f"unbroken run: {SETTINGS['max_steps']} steps in {duration:.1f} s", flush=True)
    while counts["kills"] < options.kills:
        counts["runs"] += 1
        killed_run(folder / f"killed_{counts['runs']}", shards, unbroken, options, counts, chance, begun)
    print(f"{counts['kills']} kills over {counts['runs']} runs, {counts['inside a save']} inside a save,"
          f" {counts['before the first checkpoint']} before the first checkpoint, {counts['killed while loading']}"
          f" while loading; {counts['resumes']} resumes, each from the newest complete checkpoint; {counts['equal runs']} of"
          f" {counts['runs']} runs ended with weights and optimizer state equal to the unbroken run, bit for bit; 0"
          f" runs lost, 0 steps back; seed {options.seed}, {time.monotonic() - begun:.0f} s")


def make_shards(folder: Path) -> Path:
    from prepare import prepare
    prepare(["stdlib"], folder / "shards", encoding="bytes", max_bytes=300_000, val_fraction=0.2)
    return folder / "shards"


def killed_run(run: Path, shards: Path, unbroken: Path, options, counts: Counter, chance: random.Random,
               begun: float) -> None:
    """Start a run and kill it until it is finished or the kills are used up; then let it end, and compare."""
    reached, life = 0, 0
    while True:
        life += 1
        if time.monotonic() - begun > 60 * options.minutes:
            raise Lost(f"the soak took longer than {options.minutes} minutes")
        before, output = newest_complete(run), run.with_name(f"{run.name}_life_{life}.txt")
        if before < reached:
            raise Lost(f"{run}: step {reached} was complete, and only step {before} is left")
        reached = before
        left_before = cut_off_folders(run)
        kill = next_kill(counts, chance, options.processes) if counts["kills"] < options.kills else None
        killed = live(run, shards, options.processes, output, kill)
        said = check_start(output.read_text(), before, run, killed)
        counts["resumes" if before and said else "fresh starts" if said else "killed while loading"] += 1
        if not killed:
            break
        count_kill(run, left_before, counts)
        if counts["kills"] % 10 == 0 or counts["kills"] == options.kills:
            print(f"  {counts['kills']} kills, {counts['inside a save']} inside a save, run {counts['runs']} at step"
                  f" {newest_complete(run)} of {SETTINGS['max_steps']}, {time.monotonic() - begun:.0f} s", flush=True)
    compare(run, unbroken)
    counts["equal runs"] += 1


def next_kill(counts: Counter, chance: random.Random, processes: int) -> tuple:
    """(kind, seconds, saves): inside the nth save until a third of the kills were; else at any moment."""
    if 3 * counts["inside a save"] <= counts["kills"]:
        return "save", chance.uniform(0, 0.02), chance.randint(1, 3)
    return "any", chance.uniform(0, 3.0 * processes), 0


def count_kill(run: Path, left_before: set, counts: Counter) -> None:
    """A save that was cut off has left a folder that was not there before this life."""
    counts["kills"] += 1
    counts["inside a save"] += bool(cut_off_folders(run) - left_before)
    counts["before the first checkpoint"] += newest_complete(run) == 0


def live(run: Path, shards: Path, processes: int, output: Path, kill: tuple | None = None) -> bool:
    """One life: start or resume the run in a forked process group, and kill it. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        become_the_run(run, shards, processes, output)
    end, when = time.monotonic() + LIFE_SECONDS, None if kill is None else kill_moment(run, kill)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if status:
                raise Lost(f"{run} failed by itself:\n{output.read_text()}")
            return False
        if when and when():
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            wait_for_group(child)
            return True
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            raise Lost(f"{run} hangs: no end and no save within {LIFE_SECONDS} seconds\n{output.read_text()}")
        time.sleep(0.0003 if when else 0.01)


def kill_moment(run: Path, kill: tuple):
    """A function that says when to kill: some time after the start, or after the nth folder of a save has appeared."""
    kind, delay, saves = kill
    seen, state = set(), {"at": time.monotonic() + delay if kind == "any" else None}
    left_before = cut_off_folders(run)

    def when() -> bool:
        if state["at"] is None:
            seen.update(cut_off_folders(run) - left_before)
            if len(seen) >= saves:
                state["at"] = time.monotonic() + delay
        return state["at"] is not None and time.monotonic() >= state["at"]
    return when


def cut_off_folders(run: Path) -> set:
    """{(name, inode)} of the folders of saves that are under way, or were when their life ended."""
    try:
        return {(entry.name, entry.inode()) for entry in os.scandir(run)
                if entry.name.startswith((".partial_", ".old_"))}
    except FileNotFoundError:
        return set()


def wait_for_group(group: int) -> None:
    """A killed group is gone a moment later: its workers are orphans, which the system fetches."""
    for _ in range(2000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.005)


def become_the_run(run: Path, shards: Path, processes: int, output: Path) -> None:
    """In the forked child: what `train_gpt` or `resume_gpt` do from a shell, output in a file. Never returns."""
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1), os.dup2(handle, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    status = 1
    try:
        import resume_gpt
        import train_gpt
        cpu = rt.Platform("cpu", 1, "soak")
        if newest_complete(run):
            resume_gpt.resume(run, cpu, sample_tokens=0, processes=processes)
        else:
            train_gpt.launch(train_gpt.make_config(**SETTINGS, data_folder=str(shards), run_folder=str(run),
                                                   processes=processes), cpu)
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)


def newest_complete(run: Path) -> int:
    """The highest step with a good checkpoint, by trying them all, not by the tested code's own choice; 0: none."""
    import checkpoint as ckpt
    steps = [int(path.name[-8:]) for path in run.glob("*step_*") if not path.name.startswith(".partial")
             and ckpt.what_is_wrong(path) is None]
    return max(steps, default=0)


def check_start(output: str, before: int, run: Path, killed: bool) -> bool:
    """The life must say that it began at the newest complete checkpoint; False when it was killed before."""
    said = re.search(r"resuming .* at step (\d+) of", output) or re.search(r"^steps: (\d+) to ", output, re.MULTILINE)
    if said is None and not killed and "already finished" not in output:
        raise Lost(f"{run} did not say where it began:\n{output}")
    if said and int(said.group(1)) != before:
        raise Lost(f"{run} began at step {said.group(1)}, but step {before} was complete:\n{output}")
    return said is not None or not killed


def compare(run: Path, unbroken: Path) -> None:
    import torch
    import checkpoint as ckpt
    one, other = ckpt.find_newest(run), ckpt.find_newest(unbroken)
    if one.step != other.step:
        raise Lost(f"{run} ended at step {one.step}, the unbroken run at {other.step}")
    for mine, theirs in ((one.model(), other.model()), (one.optimizer(), other.optimizer())):
        apart = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
        if apart or mine.keys() != theirs.keys():
            raise Lost(f"{run} differs from the unbroken run in {len(apart)} tensors, {apart[:3]}")


def damage_everything(run: Path, chance: random.Random) -> None:
    """Each file of the newest checkpoint truncated, a bit flipped, emptied, deleted: found, said, the one before taken."""
    import checkpoint as ckpt
    found, tried = Counter(), Counter()
    newest = ckpt.find_newest(run)
    for file in sorted(path.name for path in newest.path.iterdir()):
        for damage in ("truncated", "flipped", "emptied", "deleted"):
            copy = run.with_name("damaged")
            shutil.copytree(run, copy)
            damage_file(copy / newest.path.name / file, damage, chance)
            said = []
            taken = ckpt.find_newest(copy, said.append)
            tried[damage] += 1
            found[damage] += (taken.step < newest.step and len(said) == 1 and newest.path.name in said[0]
                              and taken.step == newest_complete(copy))
            shutil.rmtree(copy)
    print(f"damage to each of the {len(list(newest.path.iterdir()))} files of a checkpoint, found, said, and the one"
          " before taken: " + ", ".join(f"{damage} {found[damage]} of {tried[damage]}" for damage in tried))
    if found != tried:
        raise Lost("a damaged file was not found")


def damage_file(path: Path, damage: str, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes({"truncated": content[:chance.randrange(1, len(content))], "emptied": b""}.get(damage, content))
    if damage == "deleted":
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
