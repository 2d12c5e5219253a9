"""The log survives a kill, the figures are right, the curve is a picture, and silence is broken."""
import time

import pytest

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


def test_the_curve_is_a_png_and_needs_records(tmp_path):
    assert tel.draw_curve(tmp_path) is None
    log = tel.RunLog(tmp_path, active=True)
    log.write(step=0, val_loss=5.0)
    for step in range(1, 20):
        log.write(step=step, loss=5.0 / step)
    path = tel.draw_curve(tmp_path, {"bigram": 2.0})
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == [tel.CURVE_NAME, tel.LOG_NAME]


@pytest.mark.parametrize("active", [True, False])
def test_a_long_silence_is_broken(active):
    said = []
    with tel.Heartbeat(active, interval=0.1, output=lambda text, flush: said.append(text)) as heartbeat:
        heartbeat.report("step 1, compiling")
        time.sleep(0.5)
    count = len(said)
    assert (count >= 2) == active and all("step 1, compiling" in text for text in said)
    time.sleep(0.3)
    assert len(said) == count
