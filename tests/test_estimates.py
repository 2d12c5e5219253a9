"""The committed table of estimates: consistent with the presets and with what the README says."""
import os
import re

import pytest
from conftest import ROOT

import estimates
import gpt
import preflight
import train_gpt

GOAL, CHIP = 14.5, preflight.CHIPS["v5e-8"]


def preset_of(name: str) -> str:
    return "gpt2-124m" if name.startswith("the guides") else name.split(",")[0]


def test_every_row_adds_up():
    assert len(estimates.TABLE) >= 4
    for name, row in estimates.TABLE.items():
        config = train_gpt.make_config(preset_of(name), micro_batch=row["micro_batch"])
        assert row["tokens_per_step"] == config.tokens_per_step and row["fits"] == (row["peak_gib"] <= CHIP.memory_gib)
        if "step_ms" in row:
            rate = row["tokens_per_step"] / row["step_ms"] * 1e3
            flops = gpt.flops_per_token(config.model(config.vocab_size))
            assert row["tokens_per_second"] == pytest.approx(rate, rel=1e-3)
            assert row["mfu"] == pytest.approx(rate * flops / (CHIP.peak_flops * CHIP.replicas), rel=1e-2)


def test_presets_fit_with_room_and_run_at_their_own_micro_batch():
    for preset in ("gpt2-124m", "gpt2-124m-tpu"):
        row = estimates.TABLE[preset]
        assert row["fits"] and row["peak_gib"] <= GOAL and row["micro_batch"] == train_gpt.make_config(preset).micro_batch


def test_faster_than_the_guides_recipe_at_its_largest_micro_batch():
    recipe = {row["micro_batch"]: row for name, row in estimates.TABLE.items() if name.startswith("the guides")}
    largest = max(size for size, row in recipe.items() if row["fits"])
    assert any(size > largest and not row["fits"] for size, row in recipe.items())
    for preset, factor in (("gpt2-124m", 2.0), ("gpt2-124m-tpu", 2.2)):
        assert estimates.TABLE[preset]["tokens_per_second"] > factor * recipe[largest]["tokens_per_second"]


def test_the_presets_are_as_fast_as_they_are_meant_to_be():
    for preset, tokens_per_second in (("gpt2-124m", 700_000), ("gpt2-124m-tpu", 1_000_000)):
        assert estimates.TABLE[preset]["tokens_per_second"] >= tokens_per_second


def test_the_readme_says_what_the_table_says():
    readme = (ROOT / "README.md").read_text()
    for name in ("gpt2-124m", "gpt2-124m-tpu"):
        for ending in ("", ", attention written out"):
            row = estimates.TABLE.get(name + ending)
            if not row:         # the fall-back's rows are written when it is compiled
                continue
            rounded = f"{round(row['tokens_per_second'], -3):,}"
            line = rf"\| `{name}` \| .*\| {rounded} \| {100 * row['mfu']:.1f} % \| {row['peak_gib']:.2f} GiB \|"
            assert re.search(line, readme), (name, ending)


@pytest.mark.parametrize("page, hour", [("README.md", "hours"), ("README.zh.md", "小时"), ("notebooks/gpt_pretrain.py", "hours")])
def test_what_is_promised_first_is_what_the_table_says(page, hour):
    """Hours for ten billion tokens, with kernels and written out, before anything else is said."""
    beginning = " ".join((ROOT / page).read_text().splitlines()[:25])
    for name in ("gpt2-124m", "gpt2-124m, attention written out")[:1 if page.startswith("notebooks") else 2]:
        rate = estimates.TABLE[name]["tokens_per_second"]
        assert f"{1e10 / rate / 3600:.1f} {hour}" in beginning, name
        assert page.startswith("notebooks") or f"{round(rate, -3):,}" in beginning, name


def test_the_text_has_a_line_a_row():
    lines = estimates.text().splitlines()
    assert "not measurements" in lines[0] and len(lines) == 3 + len(estimates.TABLE)
    assert all(line.startswith(name) for line, name in zip(lines[3:], estimates.TABLE))


@pytest.mark.timeout(3600)
@pytest.mark.skipif("PREFLIGHT_SLOW" not in os.environ, reason="takes minutes: PREFLIGHT_SLOW=1 runs it")
@pytest.mark.parametrize("name", ["gpt2-124m", "gpt2-124m-tpu"])
def test_the_compiler_still_says_so(name):
    bench = preflight.load_file(str(ROOT / "bench" / "compile_estimates.py"))
    template, settings = bench.PLANS[name]
    now = bench.row_of(preflight.preflight(template, "v5e-8", dict(settings), print, evaluation=False))
    then = estimates.TABLE[name]
    assert now["peak_gib"] == pytest.approx(then["peak_gib"], rel=0.02)
    assert now["step_ms"] == pytest.approx(then["step_ms"], rel=0.02)
