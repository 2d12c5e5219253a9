"""The log survives a kill, the figures are right, the curve is a picture, and silence is broken."""
import re
import shutil
import time

import pytest
from conftest import ROOT

import runtime as rt
import telemetry as tel


def test_throughput_counts_steps_between_readings_and_time_left():
    now = [0.0]
    speed = tel.Throughput(1000, flops_per_token=2e9, peak_flops_total=1e13, clock=lambda: now[0])
    speed.start(10)
    now[0] = 2.0
    assert speed.read(20, 100) == {"tokens_per_s": 5000.0, "mfu": 1.0, "seconds_left": 16.0}
    now[0] = 50.0
    speed.start(20)         # an evaluation took 48 seconds: not training
    now[0] = 51.0
    assert speed.read(30, 100)["tokens_per_s"] == 10_000
    assert speed.read(30, 100)["tokens_per_s"] is None


def test_an_unknown_chip_has_no_peak():
    assert tel.peak_flops("v5e") == 197e12 and tel.peak_flops("NVIDIA H200") == 989e12
    assert tel.peak_flops("TPU of tomorrow") is None
    assert tel.Throughput(1, 1.0, None).peak is None


def test_the_log_drops_what_will_be_trained_again_and_an_unfinished_line(tmp_path):
    log = tel.RunLog(tmp_path, active=True)
    for step in range(1, 6):
        log.write(step=step, loss=float(step))
    with (tmp_path / tel.LOG_NAME).open("a") as file:
        file.write('{"step": 6, "lo')
    assert [r["step"] for r in tel.read_log(tmp_path)] == [1, 2, 3, 4, 5]
    tel.RunLog(tmp_path, active=False, first_step=1)
    assert len(tel.read_log(tmp_path)) == 5
    tel.RunLog(tmp_path, active=True, first_step=3).write(step=4, loss=0.5)
    assert [(r["step"], r["loss"]) for r in tel.read_log(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 0.5)]
    tel.RunLog(tmp_path, active=True)
    assert tel.read_log(tmp_path) == []


def test_the_progress_line_shows_what_is_known():
    record = dict(step=5, loss=2.5, lr=1e-3, grad_norm=0.7, tokens_per_s=12345.6, mfu=None, seconds_left=3725)
    assert tel.progress_line(record, 100) == ("step   5/100  loss 2.5000  lr 1.00e-03  norm 0.70  12,346 tokens/s"
                                              "  1:02:05 left")
    assert "MFU 41.2%" in tel.progress_line({**record, "mfu": 0.412}, 100)
    assert "left" not in tel.progress_line({**record, "tokens_per_s": None}, 100)
    assert tel.progress_line({**record, "host_gib": 2.0, "device_gib": 4.92}, 100).endswith("left  4.9 GiB")


def test_the_curve_is_a_png_and_needs_records(tmp_path):
    assert tel.draw_curve(tmp_path) is None
    log = tel.RunLog(tmp_path, active=True)
    log.write(step=0, val_loss=5.0)
    for step in range(1, 20):
        log.write(step=step, loss=5.0 / step)
    path = tel.draw_curve(tmp_path, {"bigram": 2.0})
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == [tel.CURVE_NAME, tel.LOG_NAME]


def beating(**settings):
    """(what was written, the heartbeat)"""
    written = []
    return written, tel.Heartbeat(settings.pop("active", True), write=written.append, **settings)


@pytest.mark.parametrize("active", [True, False])
def test_a_long_silence_is_broken(active):
    written, heartbeat = beating(active=active, interval=0.1, live=False)
    with heartbeat:
        heartbeat.report("step 1, compiling")
        time.sleep(0.5)
    count = len(written)
    assert (count >= 2) == active and all("step 1, compiling" in text and text.endswith("\n") for text in written)
    time.sleep(0.3)
    assert len(written) == count


def test_a_hang_names_the_place_where_the_rank_stands():
    import checkpoint as ckpt
    written, heartbeat = beating(interval=0.1, live=False, hang_after=0.2)
    with heartbeat, ckpt.Writer(True) as writer:
        writer.start(time.sleep, 0.8)
        heartbeat.report("saving")
        writer.wait()
    line = ckpt.Writer.wait.__code__.co_firstlineno
    assert re.search(r"this rank stands in wait \(checkpoint.py:(\d+)\)", written[-1]), written
    assert line < int(re.search(r":(\d+)\)", written[-1])[1]) < line + 30


def screen(text: str) -> list:
    """What a terminal or a notebook shows of text with carriage returns: each writes over the line from its start."""
    lines = []
    for row in text.split("\n"):
        shown = ""
        for part in row.split("\r"):
            shown = part + shown[len(part):]
        lines.append(shown.rstrip())
    return lines


def test_in_a_notebook_one_line_is_written_over_and_what_is_said_stays_above_it():
    written, heartbeat = beating(live=True)
    with heartbeat:
        heartbeat.progress("step 1  a long line of figures")
        heartbeat.progress("step 2")
        heartbeat.say("validation 3.2")
        assert screen("".join(written)) == ["validation 3.2", "step 2"]
        heartbeat.progress("step 3")
    assert screen("".join(written)) == ["validation 3.2", "step 3", ""]


def test_elsewhere_every_line_stays():
    written, heartbeat = beating(live=False)
    with heartbeat:
        heartbeat.progress("step 1")
        heartbeat.say("validation 3.2")
        heartbeat.progress("step 2")
    assert "".join(written) == "step 1\nvalidation 3.2\nstep 2\n"
    assert not tel.in_live_notebook()


def test_colabs_shell_is_live_too(monkeypatch):
    """google.colab derives its Shell from ipykernel's; any class derived like that stands for it."""
    import IPython
    from ipykernel.zmqshell import ZMQInteractiveShell
    class Shell(ZMQInteractiveShell):
        def __init__(self):
            pass
    monkeypatch.setattr(IPython, "get_ipython", Shell)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    assert tel.in_live_notebook()


def test_a_jump_of_the_loss_after_a_resume_is_told_and_an_ordinary_loss_is_not(tmp_path):
    log = tel.RunLog(tmp_path, active=True)
    for step in range(1, 31):
        log.write(step=step, loss=3.0 - step * 0.01)
    assert tel.jump_after_resume(tmp_path, 30, 2.75) is None
    assert "THE LOSS JUMPED: 5.200 after the resume, 2.700 to 2.890" in tel.jump_after_resume(tmp_path, 30, 5.2)
    assert tel.jump_after_resume(tmp_path, 3, 5.2) is None, "three losses say nothing of the spread"


@pytest.mark.parametrize("run_type, live", [("Interactive", True), ("Batch", False)])
def test_a_real_kernel_is_live_but_not_in_kaggles_batch_run(tmp_path, monkeypatch, run_type, live):
    """Kaggle executes a saved version as Batch: nobody watches, and its log keeps every line."""
    import nbclient
    import nbformat
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", run_type)
    code = f"""import sys
sys.path.insert(0, {str(ROOT / "py")!r})
import telemetry
with telemetry.Heartbeat(True) as heartbeat:
    heartbeat.progress("step 1")
    heartbeat.progress("step 2")"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": tmp_path}}).execute()
    written = "".join(output["text"] for output in notebook.cells[0].outputs)
    assert written == ("\rstep 1\rstep 2\n" if live else "step 1\nstep 2\n")


def test_a_resume_from_other_weights_is_told_at_its_first_step(tmp_path, shards, capfd):
    """A checkpoint whose weights were replaced by fresh ones, complete and with right hashes."""
    import checkpoint as ckpt
    import resume_gpt
    import train_gpt
    platform = rt.Platform("cpu", 1, "test")
    settings = dict(data_folder=str(shards), run_folder=str(tmp_path / "run"), learning_rate=1e-2, max_steps=42,
                    eval_every=100, save_every=100, sample_tokens=0)
    run = train_gpt.launch(train_gpt.make_config("tiny", stop_at=40, **settings), platform)
    assert "THE LOSS JUMPED" not in capfd.readouterr().out
    saved = ckpt.find_newest(run)
    fresh = train_gpt.GPT(train_gpt.make_config("tiny").model(saved.state()["vocab_size"]))
    for name, tensor in fresh.state_dict().items():     # far from zero, so that the loss is far from the trained one
        tensor.mul_(3)
    state, optimizer = saved.state(), saved.optimizer()
    shutil.rmtree(saved.path)
    ckpt.save(run, ckpt.step_folder(40), 40, ckpt.model_tensors(fresh), optimizer, state)
    resume_gpt.resume(run, platform)
    assert re.search(r"THE LOSS JUMPED: \d+\.\d+ after the resume", capfd.readouterr().out)
