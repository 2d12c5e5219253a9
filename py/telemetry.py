"""What a run tells a person: the log, the progress line, throughput, MFU, time left, the curve, a sign of life.

log.jsonl in the run folder has one JSON object a line; every figure shown anywhere comes from it. A tracker that
Accelerate knows (`log_with="tensorboard"`) gets the same records.
"""
import difflib
import json
import os
import re
import sys
import threading
import time
import types
from pathlib import Path

from runtime import UserError

LOG_NAME, CURVE_NAME, PROFILE_FOLDER = "log.jsonl", "curve.png", "profile"

# Peak dense bf16 (T4: fp16) flop/s of one device, from the makers' data sheets.
PEAK_FLOPS = {"v5e": 197e12, "v6e": 918e12, "v4": 275e12, "v5p": 459e12, "Tesla T4": 65e12, "L4": 121e12,
              "A100": 312e12, "H100": 989e12, "H200": 989e12}


def peak_flops(device_kind: str) -> float | None:
    """Peak flop/s of a device by its name; None when it is not known, never a guess."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


class RunLog:
    """Appends records to log.jsonl on the main process; on the others it does nothing.

    Resuming at `first_step` drops the records after it: they belong to steps that will be trained again.
    log_with: also hand every record to this tracker of Accelerate's, with `settings` as the run's hyperparameters; a
    resumed run hands it the kept records first, so that its curves are whole. Use as a context then.
    """

    def __init__(self, folder: str | Path, active: bool, first_step: int = 0, log_with: str = "",
                 settings: dict | None = None):
        self.path, self.active, self.tracker = Path(folder) / LOG_NAME, active, None
        if active:
            kept = [record for record in read_log(folder) if record["step"] <= first_step] if first_step else []
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(partial, self.path)
            if log_with:
                self.tracker = start_tracker(log_with, Path(folder), settings or {})
                for record in kept:
                    self.track(record)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.tracker:
            self.tracker.finish()

    def track(self, record: dict) -> None:
        if not self.tracker:
            return
        try:
            self.tracker.log({name: value for name, value in record.items() if name != "step" and value is not None},
                             step=record["step"])
        except Exception as error:      # a service that does not answer is no reason to end a training
            print(f"the tracker failed and gets no more records, {self.path} goes on: {error!r}", flush=True)
            self.tracker = None

    def write(self, **record) -> None:
        self.track(record)
        if self.active:
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise UserError(f"The log {self.path} cannot be written ({error.strerror}): was it moved or removed, or"
                                " is the disk full? Put it right, and resume from the newest checkpoint.") from None


def check_tracker(log_with: str) -> None:
    """Raise UserError unless Accelerate knows this tracker and its package is installed; "" is no tracker."""
    if not log_with:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS as known, get_available_trackers
    if log_with not in known:
        close = difflib.get_close_matches(log_with, known, n=1)
        raise UserError(f"log_with={log_with!r} is no tracker that this Accelerate knows"
                        f"{f', did you mean {close[0]!r}?' if close else ':'} It knows {', '.join(sorted(known))}.")
    if log_with not in map(str, get_available_trackers()):
        raise UserError(f"log_with={log_with!r} needs a package that is not installed: pip install {log_with}, or set"
                        " log_with='' to write log.jsonl alone.")


def start_tracker(log_with: str, folder: Path, settings: dict):
    """Accelerate's own tracker of this name, started on this process alone; what it writes locally goes into `folder`.

    For TensorBoard everything that an earlier session wrote there is marked as replaced: it is logged again.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS
    # With this module, TensorBoard's own switch, it does not import tensorflow, which is slow and may take the TPU.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    kind = LOGGER_TYPE_TO_CLASS[log_with]
    where = [str(folder / "tracker")] if kind.requires_logging_directory else []
    tracker = kind(folder.name, *where, **({"purge_step": 0} if log_with == "tensorboard" else {}))
    if hasattr(tracker, "start"):       # Accelerate before 1.9 starts in the constructor
        tracker.start()
    tracker.store_init_configuration(settings)
    return tracker


def read_log(folder: str | Path) -> list[dict]:
    """The records of a run, oldest first; an unfinished last line, left by a kill, is passed over."""
    path = Path(folder) / LOG_NAME
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def parse_steps(text: str) -> range | None:
    """'10-12' -> range(10, 13), '10' -> range(10, 11), '' -> None. Raises UserError for anything else."""
    if not text:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    steps = found and range(int(found[1]), int(found[2] or found[1]) + 1)
    if not steps or steps[0] < 1:
        raise UserError(f"profile_steps={text!r} must be two steps from 1 on, the first not after the last, as in"
                        " '10-12'.")
    return steps


class Profile:
    """Records what host and device do in the steps of `profile_steps`, on the main process, into the folder `profile`.

    Use as a context; `begin(step)` before each step, `end(step)` after it. The trace (`*.trace.json`, gzipped on XLA)
    opens in Perfetto (ui.perfetto.dev) and in TensorBoard with its profile plugin.
    """

    def __init__(self, runtime, profile_steps: str, folder: str | Path):
        self.runtime, self.folder = runtime, Path(folder) / PROFILE_FOLDER
        self.steps = (runtime.is_main and parse_steps(profile_steps)) or range(0)
        self.active = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(None)

    def begin(self, step: int) -> None:
        if step in self.steps and not self.active:
            self.runtime.start_trace(self.folder)
            self.active = True

    def end(self, step: int | None) -> None:
        """After the last profiled step, or with None whenever the run ends: wait for the device and write the trace."""
        if self.active and (step is None or step >= self.steps[-1]):
            self.active = False
            self.runtime.stop_trace()
            self.runtime.print(f"profile written to {self.folder}: open its trace.json in ui.perfetto.dev")


class Throughput:
    """Tokens a second and time left, over the steps since the last reading. The first step, which compiles, is left out.

    unit: what is counted instead of tokens, 'images' for instance.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: float, peak_flops_total: float | None, clock=time.monotonic,
                 unit: str = "tokens"):
        self.tokens_per_step, self.flops_per_token, self.peak = tokens_per_step, flops_per_token, peak_flops_total
        self.clock, self.unit, self.mark = clock, unit, None

    def start(self, step: int) -> None:
        """Start, or start anew after something that is not training: a compilation, an evaluation, a save."""
        self.mark = (step, self.clock())

    def read(self, step: int, last_step: int) -> dict:
        """{'tokens_per_s', 'mfu', 'seconds_left'} since the last start or read; a value is None where it is not known."""
        now = self.clock()
        steps, seconds = step - self.mark[0], now - self.mark[1]
        self.mark = (step, now)
        if steps == 0 or seconds <= 0:
            return {f"{self.unit}_per_s": None, "mfu": None, "seconds_left": None}
        rate = steps * self.tokens_per_step / seconds
        return {f"{self.unit}_per_s": rate, "mfu": rate * self.flops_per_token / self.peak if self.peak else None,
                "seconds_left": (last_step - step) * seconds / steps}


def clock_text(seconds: float) -> str:
    """3725 -> '1:02:05', 65 -> '1:05'."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def progress_line(record: dict, last_step: int, unit: str = "tokens") -> str:
    """One line for a person: step, loss, learning rate, gradient norm, tokens/s (or another unit's), MFU, time left, memory."""
    words = [f"step {record['step']:>{len(str(last_step))}}/{last_step}", f"loss {record['loss']:.4f}",
             f"lr {record['lr']:.2e}", f"norm {record['grad_norm']:.2f}"]
    if record.get(f"{unit}_per_s"):
        words.append(f"{record[f'{unit}_per_s']:,.0f} {unit}/s")
        words += [f"MFU {record['mfu']:.1%}"] if record.get("mfu") else []
        words.append(f"{clock_text(record['seconds_left'])} left")
    memory = record.get("device_gib") or record.get("host_gib")
    words += [f"{memory:.1f} GiB"] if memory else []
    return "  ".join(words)


def jump_after_resume(folder: str | Path, first_step: int, loss: float) -> str | None:
    """A sentence when the first loss after a resume lies far above the last twenty before it; None otherwise."""
    before = [record["loss"] for record in read_log(folder) if "loss" in record and record["step"] <= first_step][-20:]
    if len(before) < 5 or loss <= max(before) + max(max(before) - min(before), 0.1):
        return None
    return (f"THE LOSS JUMPED: {loss:.3f} after the resume, {min(before):.3f} to {max(before):.3f} in the steps before."
            " The weights, the optimizer state or the data are not those that were saved: compare the data folder and the"
            " code with those of the first session.")


def in_live_notebook() -> bool:
    """Whether a person watches in Jupyter: there a line may be written over. Kaggle's batch run keeps a plain log."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    in_kernel = any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)      # Colab's is derived
    return in_kernel and os.environ.get("KAGGLE_KERNEL_RUN_TYPE") != "Batch"


class Heartbeat:
    """What a person sees while a run trains: one line that is written over in Jupyter, a plain log elsewhere.

    Use as a context, in the thread that trains. `say(text)` stays; `progress(text)` is replaced by the next;
    `report(text)` says what goes on now, and is shown when nothing else was for `interval` seconds, so a compilation
    never looks like a hang. After `hang_after` seconds the line also says where this rank stands.
    """

    def __init__(self, active: bool, interval: float = 20.0, live: bool | None = None, hang_after: float = 300.0,
                 write=None):
        self.active, self.interval, self.hang_after = active, interval, hang_after
        self.live = in_live_notebook() if live is None else live
        self.write = write or write_to_stdout
        self.doing, self.since, self.line, self.thread = "starting", time.monotonic(), "", None
        self._stop, self._lock = threading.Event(), threading.Lock()

    def __enter__(self):
        self.thread = threading.get_ident()
        if self.active:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        with self._lock:
            if self.line:
                self.write("\n")
            self.line = ""

    def report(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def progress(self, text: str) -> None:
        """Show a line in place of the last one; a line of its own in a plain log."""
        if self.active:
            with self._lock:
                self.write(f"\r{text.ljust(len(self.line))}" if self.live else f"{text}\n")
                self.line = text if self.live else ""

    def say(self, text: str, flush: bool = True) -> None:
        """Print lines that stay, above the line that is written over."""
        if self.active:
            with self._lock:
                clear = f"\r{' ' * len(self.line)}\r" if self.line else ""
                self.write(f"{clear}{text}\n{self.line}")

    def _beat(self):
        while not self._stop.wait(self.interval):
            silence = time.monotonic() - self.since
            if silence >= self.interval:
                where = standing_at(self.thread) if silence >= self.hang_after else ""
                self.progress(f"  ... {self.doing}, {clock_text(silence)} so far{where}")


def write_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def standing_at(thread: int) -> str:
    """'; this rank stands in evaluate (train_gpt.py:254)': the innermost line of a thread that is not a library's."""
    frame, own = sys._current_frames().get(thread), Path(__file__).parent
    while frame and Path(frame.f_code.co_filename).parent != own:
        frame = frame.f_back
    if not frame:
        return ""
    return f"; this rank stands in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def draw_curve(folder: str | Path, reference: dict | None = None, unit: str = "nats per token") -> Path | None:
    """Draw the training and validation loss of log.jsonl to curve.png; returns its path, or None without records.

    reference: {label: loss per token} drawn as horizontal lines.
    """
    from matplotlib.figure import Figure        # the figure alone: no pyplot, no global state, no display
    records = read_log(folder)
    training = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    if not training:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*training), color="tab:blue", linewidth=1, alpha=0.7, label="training")
    if validation:
        axes.plot(*zip(*validation), color="tab:red", marker="o", markersize=4,
                  label=f"validation, last {validation[-1][1]:.3f}")
    for style, (label, loss) in zip(("--", ":", "-."), (reference or {}).items()):
        axes.axhline(loss, color="gray", linestyle=style, linewidth=1, label=f"{label}, {loss:.3f}")
    axes.set(xlabel="optimizer step", ylabel=f"loss ({unit})", title=f"{Path(folder).name}")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, Path(folder) / CURVE_NAME)


def save_figure(figure, path: Path) -> Path:
    """Write a matplotlib figure as PNG, whole or not at all."""
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
    return path
