"""Compile the presets, their fall-back and the guides' recipe for a v5e-8 and write the table of py/estimates.py.

    python bench/compile_estimates.py                   # all rows, each takes two minutes or more on two cores
    python bench/compile_estimates.py guides            # only the rows whose name contains the word, or is it: =gpt2-124m

No TPU is used: every figure is an estimate by the TPU's own compiler. `make preflight` shows one row with its details.
"""
import datetime
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "py"))

import estimates
import preflight

RECIPE = str(ROOT / "bench" / "guides_recipe.py")
PLANS = {
    "gpt2-124m": ("gpt", dict(preset="gpt2-124m")),
    "gpt2-124m, attention written out": ("gpt", dict(preset="gpt2-124m", attention="plain")),
    "gpt2-124m-tpu": ("gpt", dict(preset="gpt2-124m-tpu")),
    "gpt2-124m-tpu, attention written out": ("gpt", dict(preset="gpt2-124m-tpu", attention="plain")),
    "gpt2-124m, blocks recomputed": ("gpt", dict(preset="gpt2-124m", recompute=True)),
    "the guides' recipe, micro_batch 16": (RECIPE, dict(micro_batch=16)),
    "the guides' recipe, micro_batch 32": (RECIPE, dict(micro_batch=32)),
}
PLACE = ROOT / "py" / "estimates.py"


def row_of(report: dict) -> dict:
    """What the table keeps of a report; a step that does not fit has no speed."""
    facts, versions = report["facts"], report["versions"]
    row = dict(chip=report["chip"], tokens_per_step=facts["tokens_per_step"], micro_batch=facts["micro_batch"],
               fits=report["fits"], peak_gib=round(report["peak_gib"], 2), date=datetime.date.today().isoformat(),
               libtpu=versions["libtpu"])
    if report["fits"]:
        row |= dict(step_ms=round(report["step_ms"], 1), kernel_ms=round(report["kernel_ms"], 1),
                    tokens_per_second=round(report["tokens_per_second"]), mfu=round(report["mfu"], 4))
    return row


def write(table: dict) -> None:
    """Put the table in place of the one in py/estimates.py."""
    head, start, rest = PLACE.read_text().partition("TABLE = {")
    rows = []
    for name, row in table.items():
        items = [f"{key}={value!r}" for key, value in row.items()]
        rows += [f'    "{name}": dict(', f"        {', '.join(items[:5])},", f"        {', '.join(items[5:])}),"]
    PLACE.write_text(head + start + "\n" + "\n".join(rows) + "\n}" + rest[rest.index("\n\n"):])


def main(words: list) -> None:
    table = dict(estimates.TABLE)
    for name, (template, settings) in PLANS.items():
        if words and not any(word in name if word[:1] != "=" else word[1:] == name for word in words):
            continue
        print(f"== {name}", flush=True)
        report = preflight.preflight(template, "v5e-8", dict(settings), preflight.say_at_once, evaluation=False)
        print(preflight.show(report), flush=True)
        table[name] = row_of(report)
        write({name: table[name] for name in PLANS if name in table})
    print(estimates.text(table))


if __name__ == "__main__":
    main(sys.argv[1:])
