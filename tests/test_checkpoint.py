"""Checkpoints: whole or not there, damage found and named, the newest good one taken, strict loading, plain files."""
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from conftest import clean_environment, run_script

import checkpoint as ckpt
from gpt import GPT, GPTConfig
from optimizer import decay_groups
from runtime import UserError

SMALL = GPTConfig(vocab_size=64, T=8, n_layer=1, n_head=2, n_embd=16)


def saved(folder, step, value=1.0):
    return ckpt.save(folder, ckpt.step_folder(step), step, {"w": torch.full((50,), value)},
                     {"exp_avg/w": torch.zeros(50)}, {"config": {}, "best_val_loss": 2.5})


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = saved(tmp_path, 7)
    loaded = ckpt.open_checkpoint(path)
    assert loaded.step == 7 and loaded.state() == {"step": 7, "config": {}, "best_val_loss": 2.5}
    assert torch.equal(loaded.model()["w"], torch.ones(50)) and set(loaded.optimizer()) == {"exp_avg/w"}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000007"]


@pytest.mark.parametrize("file", [ckpt.MODEL, ckpt.OPTIMIZER, ckpt.STATE, ckpt.MANIFEST])
@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "delete"])
def test_every_damage_to_every_file_is_found_and_the_one_before_is_taken(tmp_path, file, damage):
    saved(tmp_path, 1)
    path = saved(tmp_path, 2) / file
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    else:
        middle = len(content) // 2
        path.write_bytes({"truncate": content[:-1], "empty": b"",
                          "flip": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1:]}[damage])
    said = []
    assert ckpt.find_newest(tmp_path, said.append).step == 1
    assert len(said) == 1 and "step_00000002" in said[0]
    with pytest.raises(UserError, match="is not a usable checkpoint"):
        ckpt.open_checkpoint(path.parent)


def test_foreign_entries_are_ignored(tmp_path):
    saved(tmp_path, 3)
    (tmp_path / "step_notes.txt").write_text("mine")
    (tmp_path / ".partial_step_00000009").mkdir()
    (tmp_path / "step_00000008").mkdir()
    said = []
    assert ckpt.find_newest(tmp_path, said.append).step == 3 and len(said) == 1
    assert ckpt.find_newest(tmp_path / "nowhere") is None


def test_old_ones_are_removed_only_beyond_those_to_keep(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    (tmp_path / "step_00000009").mkdir()        # cut off: it does not count as one of the newest
    ckpt.remove_old(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000009"]


@pytest.mark.parametrize("damaged", [2, 4])
def test_a_damaged_one_does_not_take_the_place_of_a_good_one(tmp_path, damaged):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    (tmp_path / ckpt.step_folder(damaged) / ckpt.MODEL).write_bytes(b"")
    (tmp_path / "step_mine").mkdir()
    ckpt.remove_old(tmp_path, keep=3)
    assert {p.name for p in tmp_path.iterdir()} == {"step_mine", *map(ckpt.step_folder, (1, 2, 3, 4))}
    ckpt.remove_old(tmp_path, keep=2)
    left = {int(p.name[5:]) for p in tmp_path.glob("step_0*")}
    assert left == ({3, 4} if damaged == 2 else {2, 3, 4}) and (tmp_path / "step_mine").exists()


def test_a_disk_that_gives_back_other_bytes_is_found_before_anything_is_replaced(tmp_path, monkeypatch):
    saved(tmp_path, 1, value=1.0)
    write = ckpt._write
    def forgetful(path, *parts):
        described = write(path, *parts)
        if path.name == ckpt.OPTIMIZER:
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        return described
    monkeypatch.setattr(ckpt, "_write", forgetful)
    for step in (1, 2):
        with pytest.raises(OSError, match="read back after writing, optimizer.safetensors does not have the content"):
            saved(tmp_path, step, value=2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert ckpt.open_checkpoint(tmp_path / "step_00000001").model()["w"][0] == 1.0


def test_what_cut_off_saves_left_is_removed_and_the_only_complete_one_comes_back(tmp_path):
    """Killed between the two renames: the old folder has stepped aside and the new one is not there yet."""
    saved(tmp_path, 1).rename(tmp_path / ".old_step_00000001")
    ckpt.copy(saved(tmp_path / "elsewhere", 5), tmp_path, "best").rename(tmp_path / ".old_best")
    (tmp_path / ".partial_step_00000007").mkdir()
    (tmp_path / ".partial_best").mkdir()
    shutil.copytree(saved(tmp_path, 2), tmp_path / ".old_step_00000002")
    saved(tmp_path, 3)
    assert {p.name for p in tmp_path.iterdir()} == {"step_00000001", "step_00000002", "step_00000003", "best", "elsewhere"}
    assert ckpt.open_checkpoint(tmp_path / "best").step == 5


def test_the_best_copy_outlives_its_step(tmp_path):
    path = saved(tmp_path, 1, value=1.0)
    ckpt.copy(path, tmp_path, "best")
    shutil.rmtree(path)
    ckpt.copy(saved(tmp_path, 2, value=2.0), tmp_path, "best")
    assert ckpt.open_checkpoint(tmp_path / "best").model()["w"][0] == 2.0


SAVE_FOR_EVER = """
    import torch, checkpoint as ckpt
    for step in range(1, 10**6):
        weights = {f"w{i}": torch.full((20000,), float(step)) for i in range(4)}
        ckpt.save("run", ckpt.step_folder(step), step, weights, {"exp_avg/w": torch.full((20000,), float(step))}, {})
        ckpt.remove_old("run", 2)
"""


@pytest.mark.parametrize("delay", [0.013, 0.031, 0.058, 0.097, 0.151, 0.223])
def test_a_kill_at_any_moment_leaves_a_consistent_checkpoint(tmp_path, delay):
    (tmp_path / "s.py").write_text(textwrap.dedent(SAVE_FOR_EVER))
    process = subprocess.Popen([sys.executable, "s.py"], cwd=tmp_path, env=clean_environment())
    while not any((tmp_path / "run").glob("step_*/manifest.json")):
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    newest = ckpt.find_newest(tmp_path / "run", lambda line: None)
    values = {float(t[0]) for t in (*newest.model().values(), *newest.optimizer().values())}
    assert values == {float(newest.step)}, "tensors of different steps in one checkpoint"


def test_a_full_disk_leaves_the_older_ones(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    def full(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(ckpt, "save_file", full)
    with pytest.raises(OSError):
        saved(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"] and ckpt.find_newest(tmp_path).step == 1


def test_files_are_read_by_a_python_that_knows_only_safetensors(tmp_path):
    model = GPT(SMALL)
    ckpt.save(tmp_path, "step_00000001", 1, ckpt.model_tensors(model), {}, {})
    done = run_script("""
        from safetensors import safe_open
        with safe_open("step_00000001/model.safetensors", "pt") as file:
            print(sum(file.get_tensor(name).numel() for name in file.keys()), {str(file.get_tensor(n).dtype) for n in file.keys()})
        """, tmp_path)
    assert done.stdout.split()[0] == str(sum(p.numel() for p in model.parameters())) and "{'torch.float32'}" in done.stdout


def test_every_kind_of_tensor_is_read_back_by_the_library_and_the_hash_is_that_of_the_file(tmp_path):
    from safetensors.torch import load_file
    tensors = {"a": torch.randn(3, 5), "scalar": torch.tensor(7.0), "empty": torch.zeros(0, 4), "half": torch.randn(7).half(),
               "bf16": torch.randn(3).bfloat16(), "count": torch.arange(3), "part": torch.randn(6, 6)[:, 1:3]}
    described = ckpt.save_file(tensors, tmp_path / "file")
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys() and described == ckpt.describe(tmp_path / "file")
    assert all(torch.equal(loaded[name], t) and loaded[name].dtype == t.dtype for name, t in tensors.items())


def test_wrappers_do_not_leak_into_the_names():
    model = GPT(SMALL)
    assert set(ckpt.model_tensors(torch.compile(model))) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop("wte.weight"), "wte.weight is missing"),
    (lambda t: t.update(extra=torch.zeros(1)), "extra is not in the model"),
    (lambda t: t.update({"wpe.weight": torch.zeros(9, 16)}), r"wpe.weight has shape \(9, 16\), the model \(8, 16\)")])
def test_a_checkpoint_that_does_not_match_is_refused_and_loads_nothing(change, words):
    tensors = ckpt.model_tensors(GPT(SMALL))
    change(tensors)
    model = GPT(SMALL)
    before = ckpt.model_tensors(model)
    with pytest.raises(UserError, match=words):
        ckpt.load_model(model, tensors)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_optimizer_state_goes_round_by_name_and_exists_before_step_one():
    def train(model, optimizer, steps):
        for _ in range(steps):
            model(torch.arange(8)[None], torch.arange(8)[None]).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1))
    ckpt.load_optimizer(optimizer, model)
    assert len(optimizer.state) == len(list(model.parameters()))
    train(model, optimizer, 3)
    weights, state = ckpt.model_tensors(model), ckpt.optimizer_tensors(optimizer, model)
    assert {float(t) for name, t in state.items() if name.startswith("step/")} == {3.0}
    train(model, optimizer, 2)
    twin = GPT(SMALL)
    ckpt.load_model(twin, weights)
    other = torch.optim.AdamW(decay_groups(twin, 0.1))
    ckpt.load_optimizer(other, twin, state)
    train(twin, other, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    del state["exp_avg/wte.weight"]
    with pytest.raises(UserError, match="exp_avg/wte.weight"):
        ckpt.load_optimizer(other, twin, state)


def test_state_is_plain_json(tmp_path):
    state = json.loads((saved(tmp_path, 1) / ckpt.STATE).read_text())
    assert isinstance(state["best_val_loss"], float) and not [f for f in os.listdir(tmp_path / "step_00000001") if "pt" in f.split(".")]
