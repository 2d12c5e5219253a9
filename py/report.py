"""What a run has cost: steps, tokens, time and where it went, compilations and why, transfers, memory.

    python py/report.py runs/demo       # the table, and report.json beside the log

Everything comes from log.jsonl, so it can be asked for at any time: while a run trains, after its end, after a kill.
"""
import json
import os
import sys
from pathlib import Path

import runtime as rt
import telemetry
from runtime import UserError

REPORT_NAME = "report.json"


def summarize(folder: str | Path) -> dict:
    """The figures of a run folder, all sessions together. Raises UserError where there is no log.

    seconds: where the time went, each part as the host saw it: the device still works on earlier steps when an
    evaluation or a save begins, at most log_every of them. step_seconds: over logged intervals, each counted with its steps.
    """
    records = telemetry.read_log(folder)
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise UserError(f"{folder} has no {telemetry.LOG_NAME} with a trained step: give the folder of a run.")
    intervals = step_intervals(steps)
    training = sum(count * seconds for count, seconds in intervals)
    validation = [record["val_loss"] for record in records if "val_loss" in record]
    reasons = [reason for record in steps for reason in record.get("retrace_reasons", ())]
    return dict(
        run=Path(folder).name, steps=steps[-1]["step"], tokens=steps[-1].get("tokens"), sessions=len(sessions(steps)),
        loss=steps[-1]["loss"], val_loss=validation[-1] if validation else None,
        best_val_loss=min(validation, default=None),
        tokens_per_s=median([record["tokens_per_s"] for record in steps if record.get("tokens_per_s")]),
        mfu=median([record["mfu"] for record in steps if record.get("mfu")]),
        step_seconds={name: percentile(intervals, part) for name, part in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95),
                                                                           ("longest", 1.0))},
        seconds=dict(first_steps=total(steps, "first_step_seconds"), training=training,
                     evaluating=total(records, "eval_seconds"), saving=total(records, "save_seconds")),
        compilations=over_sessions(steps, "compiles"), compile_seconds=over_sessions(steps, "compile_seconds"),
        retraces=over_sessions(steps, "retraces"), retrace_reasons=list(dict.fromkeys(reasons)),
        transfers_to_device=over_sessions(steps, "to_device"),
        transfers_from_device=over_sessions(steps, "from_device"),
        peak_host_gib=largest(steps, "host_gib"), peak_device_gib=largest(steps, "device_gib"))


def sessions(steps: list) -> list[list]:
    """The step records, cut where a session began: counters begin at 0 there."""
    cut = []
    for record in steps:
        if not cut or "first_step_seconds" in record:
            cut.append([])
        cut[-1].append(record)
    return cut


def step_intervals(steps: list) -> list[tuple]:
    """(steps, seconds a step) of every logged interval whose speed is known."""
    return [(now["step"] - before["step"], (now["tokens"] - before["tokens"]) / (now["step"] - before["step"])
             / now["tokens_per_s"]) for before, now in zip(steps, steps[1:])
            if now.get("tokens_per_s") and before.get("tokens")]


def percentile(intervals: list, part: float) -> float | None:
    """The seconds that this part of all steps does not exceed."""
    wanted, seen = part * sum(count for count, _ in intervals), 0
    for count, seconds in sorted(intervals, key=lambda interval: interval[1]):
        seen += count
        if seen >= wanted:
            return seconds


def median(values: list) -> float | None:
    return percentile([(1, value) for value in values], 0.5)


def total(records: list, name: str) -> float:
    return sum(record.get(name) or 0 for record in records)


def largest(records: list, name: str) -> float | None:
    return max((record[name] for record in records if record.get(name)), default=None)


def over_sessions(steps: list, name: str) -> float:
    """A counter's last value in each session, added up."""
    return sum(max((record.get(name) or 0 for record in session), default=0) for session in sessions(steps))


def table(figures: dict) -> str:
    """The figures as lines for a person; what is not known is left out."""
    step, seconds = figures["step_seconds"], figures["seconds"]
    whole = sum(seconds.values()) or 1
    spent = ", ".join(f"{name.replace('_', ' ')} {telemetry.clock_text(value)} ({value / whole:.0%})"
                      for name, value in seconds.items() if value)
    in_sessions = f" in {figures['sessions']} sessions" if figures["sessions"] > 1 else ""
    memory = [f"{name} {figures[key]:.2f} GiB" for name, key in (("device", "peak_device_gib"),
                                                               ("host, main process", "peak_host_gib")) if figures[key]]
    validation = f", validation {figures['val_loss']:.4f}, best {figures['best_val_loss']:.4f}" if figures["val_loss"] \
        else ""
    rows = [("steps", f"{figures['steps']:,}{in_sessions}"),
            ("tokens", figures["tokens"] and f"{figures['tokens']:,}"),
            ("speed", figures["tokens_per_s"] and f"{figures['tokens_per_s']:,.0f} tokens/s"
             + (f", MFU {figures['mfu']:.1%}" if figures["mfu"] else "")),
            ("step time", step["p50"] and f"half of the steps within {step['p50'] * 1000:,.0f} ms, 95 % within"
             f" {step['p95'] * 1000:,.0f} ms, longest {step['longest'] * 1000:,.0f} ms"),
            ("time", spent),
            ("compilations", figures["compilations"] and f"{figures['compilations']} in"
             f" {figures['compile_seconds']:.1f} s, {figures['retraces']} of them retraces"),
            *(("  why", reason) for reason in figures["retrace_reasons"]),
            ("transfers", figures["transfers_to_device"] and f"{figures['transfers_to_device']:,} to the device,"
             f" {figures['transfers_from_device']:,} back"),
            ("peak memory", ", ".join(memory)), ("loss", f"training {figures['loss']:.4f}{validation}")]
    return "\n".join(f"  {name:<13} {text}" for name, text in rows if text)


def write(folder: str | Path) -> dict:
    """Write report.json into the run folder, where that can be written; returns the figures."""
    figures = summarize(folder)
    path = Path(folder) / REPORT_NAME
    try:
        path.with_suffix(".partial").write_text(json.dumps(figures, indent=1) + "\n")
        os.replace(path.with_suffix(".partial"), path)
    except OSError as error:
        print(f"{path} cannot be written ({error.strerror}); the figures are below")
    return figures


def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("Give one run folder: python py/report.py runs/demo.")
    print(f"{sys.argv[1]}\n{table(write(sys.argv[1]))}")


if __name__ == "__main__":
    rt.run_main(main)
