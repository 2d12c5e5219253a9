"""The report of a run: from a real run's log, from a log that can be counted by hand, and from the command line."""
import json
import subprocess
import sys

import pytest
import safetensors
from conftest import ROOT, clean_environment, run_script

import report
import telemetry as tel
from runtime import UserError


def log_of_two_sessions(folder):
    """Steps 1-40 at 0.5 s, an evaluation, a save, then a second session 41-60 at 1 s; 100 tokens a step."""
    log = tel.RunLog(folder, active=True)
    log.write(step=0, val_loss=5.0, eval_seconds=2.0)
    log.write(step=1, loss=4.0, tokens=100, tokens_per_s=None, compiles=3, compile_seconds=9.0, to_device=5,
              from_device=1, host_gib=1.0, first_step_seconds=10.0)
    for step in (10, 20, 30, 40):
        log.write(step=step, loss=4.0 - step / 20, tokens=100 * step, tokens_per_s=200.0, mfu=0.4, compiles=3,
                  compile_seconds=9.0, to_device=5 + step, from_device=1 + step, host_gib=2.0)
    log.write(step=40, val_loss=2.5, eval_seconds=3.0)
    log.write(step=40, save_seconds=1.5)
    log.write(step=41, loss=2.0, tokens=4100, tokens_per_s=None, compiles=2, compile_seconds=4.0, to_device=6,
              from_device=1, host_gib=1.5, first_step_seconds=5.0)
    log.write(step=60, loss=1.9, tokens=6000, tokens_per_s=100.0, mfu=0.2, compiles=3, compile_seconds=6.0,
              to_device=30, from_device=2, host_gib=1.5, device_gib=4.5, retraces=1, retrace_reasons=["step 50: x is 3x64"])


def test_the_figures_are_those_that_one_can_count(tmp_path):
    log_of_two_sessions(tmp_path)
    found = report.summarize(tmp_path)
    assert (found["steps"], found["tokens"], found["sessions"]) == (60, 6000, 2)
    assert found["seconds"] == dict(first_steps=15.0, training=pytest.approx(39 * 0.5 + 19 * 1.0), evaluating=5.0,
                                    saving=1.5)
    assert found["step_seconds"] == {"p5": 0.5, "p50": 0.5, "p95": 1.0, "longest": 1.0}
    assert (found["compilations"], found["compile_seconds"], found["retraces"]) == (6, 15.0, 1)
    assert (found["transfers_to_device"], found["transfers_from_device"]) == (75, 43)
    assert (found["peak_host_gib"], found["peak_device_gib"]) == (2.0, 4.5)
    assert (found["val_loss"], found["best_val_loss"], found["loss"]) == (2.5, 2.5, 1.9)
    text = report.table(found)
    assert "60 in 2 sessions" in text and "device 4.50 GiB" in text
    assert "why step 50: x is 3x64" in " ".join(text.split())
    assert "half of the steps within 500 ms, 95 % within 1,000 ms" in text and "MFU 40.0%" in text


def test_a_log_without_steps_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="has no log.jsonl with a trained step"):
        report.summarize(tmp_path)


def test_a_real_run_on_xla_ends_with_its_report_and_it_can_be_asked_for_again(tmp_path, shards):
    done = run_script(f"""
        import runtime, train_gpt
        platform = runtime.patch_environment("xla-cpu")
        train_gpt.launch(train_gpt.make_config("tiny", data_folder={str(shards)!r}, run_folder="run", max_steps=6,
                                               eval_every=3, save_every=3, sample_tokens=0), platform)
        """, tmp_path)
    written = json.loads((tmp_path / "run" / report.REPORT_NAME).read_text())
    assert written["steps"] == 6 and written["tokens"] == 6 * 256 and written["retraces"] == 0
    assert written["compilations"] > 2 and written["compile_seconds"] > 0 and written["peak_host_gib"] > 0.1
    # Read back until the last log line, one tensor each: 6 log steps, 2 evaluations, the replicas' sums twice, the word
    # of the writer, and of the checkpoint at step 3 every weight, and three buffers of each of the optimizer's two groups.
    # Before, once: the 12 constants of the micro-step as it was traced in the first and in the second step, to compare.
    weights = safetensors.safe_open(tmp_path / "run/step_00000003/model.safetensors", "pt").keys()
    assert written["transfers_from_device"] == 6 + 2 + 2 + 1 + len(weights) + 2 * 3 + 2 * 12
    assert min(written["seconds"].values()) > 0
    assert "compilations" in done.stdout and "peak memory" in done.stdout
    (tmp_path / "run" / report.REPORT_NAME).unlink()
    again = subprocess.run([sys.executable, ROOT / "py/report.py", "run"], cwd=tmp_path, env=clean_environment(),
                           text=True, capture_output=True, timeout=60)
    assert again.returncode == 0 and again.stdout.splitlines()[1:] == report.table(written).splitlines()
    assert json.loads((tmp_path / "run" / report.REPORT_NAME).read_text()) == written
