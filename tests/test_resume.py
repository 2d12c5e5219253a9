"""Nothing is lost: signals, saves by time, a full disk, two runs in one folder, another number of processes."""
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, clean_environment, run_script
from window_notes import Windows, windows_taken

import checkpoint as ckpt
import resume_gpt
import runtime as rt
import telemetry
import token_data
import train_gpt
from runtime import UserError

CPU = rt.Platform("cpu", 1, "test")
ENDLESS = dict(max_steps=10 ** 6, eval_every=10 ** 6, save_every=10 ** 6)


def tiny(shards, folder, **settings):
    return train_gpt.make_config("tiny", **{"data_folder": str(shards), "run_folder": str(folder), "platform": "cpu",
                                            "sample_tokens": 0, "max_steps": 6, "eval_every": 3, "save_every": 3, **settings})


def start(shards, folder, **settings) -> subprocess.Popen:
    """Train in a process group of its own; its output goes to `output.txt` beside the run folder."""
    settings = {"sample_tokens": 0, "eval_windows": 8, "log_every": 1, **settings}
    command = [sys.executable, str(ROOT / "py/train_gpt.py"), "--preset", "tiny", "--data_folder", str(shards), "--platform", "cpu",
               "--run_folder", str(folder), *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]
    with (folder.parent / "output.txt").open("w") as output:
        return subprocess.Popen(command, env=clean_environment(VIRTUAL_TPU_DEVICES="2"), start_new_session=True, stdout=output, stderr=output)


def wait_for(condition, process, seconds=120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended early, with {process.returncode}"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def steps_logged(folder) -> int:
    return max((record["step"] for record in telemetry.read_log(folder)), default=0)


def alive(group: int) -> list:
    """Processes of a group that still run; what is left of one that ended, until it is fetched, does not count."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] if int(of_group) == group and state != "Z" else []
    return found


def wait_until_all_are_gone(process, seconds=20) -> None:
    deadline = time.monotonic() + seconds
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(process.pid), "workers were left behind"


# ---- signals -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, processes, whole_group", [
    (signal.SIGTERM, 1, False), (signal.SIGTERM, 2, False), (signal.SIGINT, 1, True), (signal.SIGINT, 2, True),
    (signal.SIGINT, 2, False)])
def test_a_signal_saves_and_ends_and_the_run_goes_on_exactly(shards, tmp_path, number, processes, whole_group):
    """To the launcher alone, as `kill` does, or to all of its group, as a terminal and a notebook's stop button do."""
    folder = tmp_path / "run"
    process = start(shards, folder, processes=processes, **ENDLESS)
    wait_for(lambda: steps_logged(folder) >= 3, process)
    begun = time.monotonic()
    (os.killpg if whole_group else os.kill)(process.pid, number)
    assert process.wait(timeout=60) == 128 + number
    assert time.monotonic() - begun < 20
    output = (tmp_path / "output.txt").read_text()
    newest = ckpt.find_newest(folder)
    assert f"stopped and saved at step {newest.step} of" in output and "Traceback" not in output, output
    assert newest.step == steps_logged(folder) and not (folder / "failures").exists()
    wait_until_all_are_gone(process)
    straight = train_gpt.launch(tiny(shards, tmp_path / "straight", stop_at=newest.step, processes=processes, **ENDLESS), CPU)
    assert all(torch.equal(tensor, newest.model()[name]) for name, tensor in ckpt.find_newest(straight).model().items())


def test_a_signal_reaches_workers_whose_main_thread_is_the_launchers(shards, tmp_path):
    """As on a TPU, by the launcher's own TPU branch: ranks are threads of its children, and threads may set no handlers."""
    folder = tmp_path / "run"
    process = start(shards, folder, platform="virtual-tpu", **ENDLESS)
    wait_for(lambda: steps_logged(folder) >= 2, process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert ckpt.find_newest(folder).step == steps_logged(folder)
    wait_until_all_are_gone(process)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_signal_ends_at_once(shards, tmp_path, processes):
    """A run that logs only at its end would take for ever to obey the first one."""
    folder = tmp_path / "run"
    process = start(shards, folder, processes=processes, **{**ENDLESS, "log_every": 10 ** 6})
    wait_for(lambda: steps_logged(folder) >= 1, process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None, "the first one ended it: nothing was tested"
    begun = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    wait_until_all_are_gone(process)
    assert time.monotonic() - begun < 20


def test_workers_whose_launcher_was_killed_save_and_end(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(shards, folder, **ENDLESS)
    wait_for(lambda: steps_logged(folder) >= 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_all_are_gone(process)
    assert ckpt.find_newest(folder).step == steps_logged(folder)


def test_under_torchrun_the_ranks_share_one_run_folder(shards, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(rt._free_port()),
               str(ROOT / "py/train_gpt.py"), "--preset", "tiny", "--platform", "cpu", "--processes", "2", "--max_steps", "3",
               "--data_folder", str(shards), "--run_folder", str(tmp_path / "run"), "--sample_tokens", "0"]
    done = subprocess.run(command, env=clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    assert done.returncode == 0, done.stdout
    assert ckpt.find_newest(tmp_path / "run").step == 3 and json.loads((tmp_path / "run/config.json").read_text())["processes"] == 2


def test_the_handlers_of_the_caller_come_back(shards, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    train_gpt.launch(tiny(shards, tmp_path / "run", max_steps=1, processes=2), CPU)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# ---- saving by time, and beside the training -----------------------------------------------------------------------------

def test_a_save_is_due_by_time_on_the_main_process_alone():
    now = [0.0]
    writer, other = ckpt.Writer(True, lambda: now[0]), ckpt.Writer(False, lambda: now[0])
    now[0] = 119.0
    assert not writer.is_due(2)
    now[0] = 120.0
    assert writer.is_due(2) and not writer.is_due(0) and not other.is_due(2)
    writer.start(lambda: None)
    assert not writer.is_due(2)


def test_saves_by_time_are_agreed_by_all_ranks_and_leave_training_alone(shards, tmp_path):
    settings = dict(max_steps=12, eval_every=12, save_every=12, keep_checkpoints=20, processes=2, log_every=4, dropout=0.1)
    plain = train_gpt.launch(tiny(shards, tmp_path / "plain", **settings), CPU)
    timed = train_gpt.launch(tiny(shards, tmp_path / "timed", save_minutes=1e-9, **settings), CPU)
    assert sorted(p.name for p in plain.glob("step_*")) == ["step_00000012"]
    assert [int(p.name[5:]) for p in sorted(timed.glob("step_*"))] == [1, 4, 8, 12]
    one, other = ckpt.find_newest(plain), ckpt.find_newest(timed)
    assert all(torch.equal(tensor, other.model()[name]) for name, tensor in one.model().items())
    assert all(torch.equal(tensor, other.optimizer()[name]) for name, tensor in one.optimizer().items())


def slow_disk(monkeypatch, seconds):
    write = ckpt.save_file
    def slow(tensors, path):
        time.sleep(seconds)
        return write(tensors, path)
    monkeypatch.setattr(ckpt, "save_file", slow)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(shards, tmp_path, monkeypatch):
    slow_disk(monkeypatch, 1.0)
    folder = train_gpt.launch(tiny(shards, tmp_path / "run", max_steps=20, save_every=10, eval_every=20, dropout=0.1), CPU)
    written = {p.name: p.stat().st_mtime for p in folder.glob("step_*")}
    assert set(written) == {"step_00000010", "step_00000020"} and ckpt.find_newest(folder).step == 20
    config = json.loads((folder / "config.json").read_text())
    monkeypatch.undo()
    quick = train_gpt.launch(tiny(shards, tmp_path / "quick", max_steps=20, save_every=10, eval_every=20, dropout=0.1), CPU)
    for step in (10, 20):       # what was trained meanwhile is not in the file
        one, other = (ckpt.open_checkpoint(run / ckpt.step_folder(step)) for run in (folder, quick))
        assert all(torch.equal(tensor, other.model()[name]) for name, tensor in one.model().items()), (step, config)
        assert all(torch.equal(tensor, other.optimizer()[name]) for name, tensor in one.optimizer().items())


def test_the_writer_runs_beside_its_caller_one_job_at_a_time():
    running, most = [0], [0]
    def job():
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.3)
        running[0] -= 1
    with ckpt.Writer() as writer:
        begun = time.monotonic()
        writer.start(job)
        assert time.monotonic() - begun < 0.2, "the caller waited"
        writer.start(job)
        assert 0.25 < time.monotonic() - begun < 0.55
    assert most == [1] and running == [0], "the end did not wait"


def test_the_copy_is_not_touched_by_later_steps_and_is_one():
    model = torch.nn.Linear(4, 4)
    copied = ckpt.model_tensors(model)
    before = copied["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(copied["weight"], before) and copied["weight"].untyped_storage().nbytes() == 64


@pytest.mark.parametrize("where", ["next log step", "next save", "end"])
def test_a_writer_that_fails_ends_all_ranks_with_its_reason(shards, tmp_path, monkeypatch, where):
    """The save of step 3 fails; the run would go on to step 6, or ends there."""
    def full(tensors, path):
        if "step_00000003" in str(path):
            time.sleep(0.5)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(tensors, path)
    write = ckpt.save_file
    monkeypatch.setattr(ckpt, "save_file", full)
    settings = {"next log step": ENDLESS, "next save": dict(log_every=100, max_steps=100, save_every=3),
                "end": dict(max_steps=3)}[where]
    if where == "next log step":
        monkeypatch.setattr(ckpt.Writer, "is_due", lambda self, minutes: steps_logged(tmp_path / "run") == 2)
    begun = time.monotonic()
    with pytest.raises(UserError, match="could not be written to .*run: No space left on device. Older checkpoints") as caught:
        train_gpt.launch(tiny(shards, tmp_path / "run", processes=2, **settings), CPU)
    assert "\n" not in str(caught.value) and time.monotonic() - begun < 60
    assert not list((tmp_path / "run").glob(".partial_*"))


def test_a_mistake_in_the_writer_is_shown_with_its_traceback(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "remove_old", lambda *_: {}["no such key"])
    with pytest.raises(rt.WorkerFailed, match="(?s)Traceback.*write_checkpoint.*KeyError: 'no such key'"):
        train_gpt.launch(tiny(shards, tmp_path / "run", processes=2), CPU)
    assert list((tmp_path / "run/failures").glob("failure_*.txt")), "what the ranks said is not kept in the run folder"


def test_a_curve_that_cannot_be_drawn_does_not_end_the_run(shards, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(telemetry, "draw_curve", lambda *_: {}["no font"])
    assert ckpt.find_newest(train_gpt.launch(tiny(shards, tmp_path / "run"), CPU)).step == 6
    assert "the curve could not be drawn: KeyError('no font')" in capfd.readouterr().out


# ---- the disk --------------------------------------------------------------------------------------------------------------

def free(monkeypatch, value):
    monkeypatch.setattr(ckpt.shutil, "disk_usage", lambda path: type("Usage", (), {"free": value})())


def test_too_little_room_is_refused_before_anything_is_written(shards, tmp_path, monkeypatch):
    config = tiny(shards, tmp_path / "deep/run")
    one = 12 * train_gpt.count_parameters(config.model(384))
    model = train_gpt.GPT(config.model(384))
    assert one == 12 * sum(p.numel() for p in model.parameters())
    free(monkeypatch, 4 * one - 1)
    with pytest.raises(UserError, match=r"needs 1.9 MB for 4 checkpoints of 0.5 MB \(2 to keep.*only 1.9 MB are free") as caught:
        train_gpt.launch(config, CPU)
    assert "\n" not in str(caught.value) and not (tmp_path / "deep").exists()
    free(monkeypatch, 4 * one)
    ckpt.require_room(tmp_path / "deep/run", one // 12, 2)


def test_what_a_run_folder_already_holds_counts_as_written(tmp_path, monkeypatch):
    for step in (1, 2):
        path = ckpt.save(tmp_path, ckpt.step_folder(step), step, {"w": torch.zeros(10 ** 5)}, {"m": torch.zeros(2 * 10 ** 5)}, {})
    ckpt.copy(path, tmp_path, "best")           # shares its files with step 2
    assert 2_400_000 < ckpt.bytes_held(tmp_path) < 2_410_000
    free(monkeypatch, 2_400_000)
    ckpt.require_room(tmp_path, 10 ** 5, 2)
    free(monkeypatch, 2_300_000)
    with pytest.raises(UserError, match="make room"):
        ckpt.require_room(tmp_path, 10 ** 5, 2)


def test_a_disk_that_fills_up_meanwhile_ends_the_run_before_the_next_save(shards, tmp_path, monkeypatch):
    folder = train_gpt.launch(tiny(shards, tmp_path / "run", max_steps=9, stop_at=3), CPU)
    before = {p: p.stat().st_mtime_ns for p in folder.glob("step_*/*")}
    free(monkeypatch, 1000)
    monkeypatch.setattr(ckpt, "require_room", lambda *_: None)
    with pytest.raises(UserError, match="it needs 0.5 MB and only 0.0 MB are free. Older checkpoints are untouched"):
        resume_gpt.resume(folder, CPU, sample_tokens=0, processes=2)
    assert {p: p.stat().st_mtime_ns for p in folder.glob("step_*/*")} == before and ckpt.find_newest(folder).step == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; the checkpoint of the tiny preset takes half a MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_really_full_disk_keeps_the_last_good_state(shards, small_disk, monkeypatch, asked_before):
    """asked_before: the check sees that there is no room. Otherwise the write itself meets the end of the disk."""
    folder = train_gpt.launch(tiny(shards, small_disk / "run", max_steps=9, stop_at=3), CPU)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 300_000))
    monkeypatch.setattr(ckpt, "require_room", lambda *_: None)
    if not asked_before:
        monkeypatch.setattr(ckpt, "require_room_for_one", lambda *_: None)
    with pytest.raises(UserError, match="it needs 0.5 MB and only" if asked_before else "No space left on device") as caught:
        resume_gpt.resume(folder, CPU, sample_tokens=0)
    assert "\n" not in str(caught.value) and ckpt.find_newest(folder).step == 3 and not list(folder.glob(".partial_*"))
    filler.unlink()
    monkeypatch.undo()
    assert ckpt.find_newest(resume_gpt.resume(folder, CPU, sample_tokens=0)).step == 9


def test_a_small_disk_is_refused_before_step_one(shards, small_disk):
    with pytest.raises(UserError, match="needs .* MB for 12 checkpoints"):
        train_gpt.launch(tiny(shards, small_disk / "run", keep_checkpoints=10), CPU)
    assert not list(small_disk.iterdir())


def test_a_folder_that_cannot_be_made_is_one_sentence(shards, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"The run folder .*file/run cannot be written \(Not a directory\): give another"):
        train_gpt.launch(tiny(shards, tmp_path / "file/run"), CPU)


def test_a_read_only_mount_is_one_sentence_and_a_resume_goes_elsewhere(shards, small_disk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train_gpt.launch(tiny(shards, small_disk / "gpt", stop_at=3), CPU)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\): give another run_folder"):
        train_gpt.launch(tiny(shards, small_disk / "other"), CPU)
    assert resume_gpt.resume(folder, CPU, sample_tokens=0) == Path("runs/gpt") and ckpt.find_newest("runs/gpt").step == 6
    assert ckpt.find_newest(folder).step == 3


def test_a_folder_removed_under_the_run_is_one_sentence(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(shards, folder, **ENDLESS)
    wait_for(lambda: steps_logged(folder) >= 3, process)
    folder.rename(tmp_path / "gone")
    assert process.wait(timeout=60) == 2
    last = (tmp_path / "output.txt").read_text().splitlines()[-1]
    assert last.startswith("UserError: ") and "log.jsonl" in last and "was it moved or removed" in last


def test_two_runs_in_one_folder_are_told_apart(shards, tmp_path):
    folder = tmp_path / "run"
    process = start(shards, folder, **{**ENDLESS, "save_every": 3, "log_every": 1})
    wait_for(lambda: any(folder.glob("step_*")), process)
    with pytest.raises(UserError, match="Another run is training in .*run: wait for its end"):
        resume_gpt.resume(folder, CPU, sample_tokens=0)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_all_are_gone(process)
    reached = ckpt.find_newest(folder).step
    assert ckpt.find_newest(resume_gpt.resume(folder, CPU, stop_at=reached + 3, sample_tokens=0)).step == reached + 3


# ---- what a resume says, and another number of processes -----------------------------------------------------------------

def test_a_resume_says_what_it_does_differently():
    before = dict(processes=8, micro_batch=16, device="v5e", precision="bf16")
    assert train_gpt.what_changed(before, dict(before), 0.1).endswith("exact, as if it had never stopped")
    words = train_gpt.what_changed(before, dict(processes=1, micro_batch=16, device="Tesla T4", precision="fp16"), 0.1)
    assert words.startswith("resumed with processes 8 -> 1, device v5e -> Tesla T4, precision bf16 -> fp16: the order of data"
                            " and the learning rates stay the same, dropout and the rounding of sums differ")
    assert "dropout" not in train_gpt.what_changed(before, {**before, "processes": 1}, 0.0)
    assert "dropout" not in train_gpt.what_changed(before, {**before, "precision": "fp32"}, 0.1)


def test_another_precision_and_another_platform_are_taken_and_said(shards, tmp_path, capfd):
    folder = train_gpt.launch(tiny(shards, tmp_path / "run", stop_at=2), CPU)
    resume_gpt.resume(folder, CPU, stop_at=4, precision="fp16", sample_tokens=0)    # no scaler was saved to be restored
    assert "resumed with precision fp32 -> fp16" in capfd.readouterr().out
    done = run_script(f"""
        import runtime
        platform = runtime.patch_environment("xla-cpu")
        import resume_gpt
        resume_gpt.resume({str(folder)!r}, platform, platform="xla-cpu", precision="auto", stop_at=5, sample_tokens=0)
        """, tmp_path)
    assert "resumed with precision fp16 -> bf16" in done.stdout
    resume_gpt.resume(folder, CPU, precision="fp32", sample_tokens=0)
    assert ckpt.find_newest(folder).step == 6


# The order of summation over ranks and micro-steps is all that differs: rounding, growing slowly with the steps.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 2e-4


def assert_same_course(folder, straight, notes, straight_notes):
    one, other = telemetry.read_log(folder), telemetry.read_log(straight)
    assert windows_taken(notes) == windows_taken(straight_notes) and len(windows_taken(notes)) == 8 * one[-1]["step"]
    trained = [{r["step"]: r for r in records if "loss" in r} for records in (one, other)]
    assert trained[0].keys() == trained[1].keys()
    for step, record in trained[0].items():
        assert record["lr"] == trained[1][step]["lr"] and record["tokens"] == trained[1][step]["tokens"]
        assert record["loss"] == pytest.approx(trained[1][step]["loss"], rel=LOSS_TOLERANCE), step
    for name, tensor in ckpt.find_newest(folder).model().items():
        torch.testing.assert_close(tensor, ckpt.find_newest(straight).model()[name], atol=WEIGHT_TOLERANCE, rtol=1e-4)


def test_two_processes_then_one_then_four_take_the_same_course(shards, tmp_path, monkeypatch, capfd):
    notes = [tmp_path / "notes", tmp_path / "straight_notes"]
    [folder.mkdir() for folder in notes]
    settings = dict(max_steps=15, save_every=5, eval_every=15, micro_batch=2)
    monkeypatch.setattr(token_data, "train_batch", Windows(notes[0]))
    folder = train_gpt.launch(tiny(shards, tmp_path / "run", processes=2, stop_at=5, **settings), CPU)
    resume_gpt.resume(folder, CPU, processes=1, micro_batch=8, stop_at=10, sample_tokens=0)
    resume_gpt.resume(folder, CPU, processes=4, micro_batch=2, sample_tokens=0)
    printed = capfd.readouterr().out
    assert "resumed with processes 2 -> 1, micro_batch 2 -> 8: the order" in printed and "processes 1 -> 4" in printed
    monkeypatch.undo()
    monkeypatch.setattr(token_data, "train_batch", Windows(notes[1]))
    straight = train_gpt.launch(tiny(shards, tmp_path / "straight", processes=2, **settings), CPU)
    assert_same_course(folder, straight, *notes)


VIRTUAL_PART = """
    import sys
    sys.path.insert(0, {tests!r})
    import runtime
    platform = runtime.patch_environment("virtual-tpu")
    import resume_gpt, token_data, train_gpt, window_notes
    token_data.train_batch = window_notes.Windows({notes!r})
    if {early_rank} is not None:            # this rank's clock alone has run out; ranks are threads here
        import threading, time
        train_gpt.session_deadline = lambda minutes: time.monotonic() + (
            -1 if threading.current_thread().name == "rank {early_rank}" else 10 ** 6)
    if {begins}:
        train_gpt.launch(train_gpt.make_config("tiny", **{settings!r}), platform)
    else:
        resume_gpt.resume({folder!r}, platform, **{settings!r})
"""


def run_virtual_part(devices: int, begins: bool, where, notes, early_rank: int | None = None, **settings) -> str:
    code = VIRTUAL_PART.format(tests=str(ROOT / "tests"), notes=str(notes), begins=begins, folder=str(where), early_rank=early_rank,
                               settings=dict(platform="virtual-tpu", sample_tokens=0, **settings))
    return run_script(code, notes, VIRTUAL_TPU_DEVICES=str(devices)).stdout


def test_eight_virtual_devices_then_two_then_one_take_the_same_course(shards, tmp_path):
    """The eight are stopped by the clock of one of them, which no other rank has seen run out."""
    notes, straight_notes = tmp_path / "notes", tmp_path / "straight_notes"
    notes.mkdir(), straight_notes.mkdir()
    folder, straight = tmp_path / "run", tmp_path / "straight"
    begin = dict(data_folder=str(shards), max_steps=4, eval_every=4, n_layer=1, precision="fp32")
    run_virtual_part(8, True, folder, notes, early_rank=3, run_folder=str(folder), micro_batch=1, **begin)
    assert ckpt.find_newest(folder).step == 1
    assert "processes 8 -> 2" in run_virtual_part(2, False, folder, notes, micro_batch=4, stop_at=3)
    assert "processes 2 -> 1" in run_virtual_part(1, False, folder, notes)
    run_virtual_part(1, True, straight, straight_notes, run_folder=str(straight), micro_batch=4, **begin)
    assert_same_course(folder, straight, notes, straight_notes)


# ---- kills ----------------------------------------------------------------------------------------------------------------

def test_a_short_soak(tmp_path):
    """Five of the hundred kills of `make soak`, and every damage to every file."""
    done = subprocess.run([sys.executable, str(ROOT / "tests/soak.py"), "--kills", "5", "--steps", "100", "--folder",
                           str(tmp_path)], env=clean_environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=200)
    assert done.returncode == 0, done.stdout
    assert "5 kills over" in done.stdout and "0 runs lost, 0 steps back" in done.stdout
    assert int(done.stdout.split(" inside a save,")[-2].split()[-1]) >= 1
    assert "truncated 4 of 4, flipped 4 of 4, emptied 4 of 4, deleted 4 of 4" in done.stdout
