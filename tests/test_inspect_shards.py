"""inspect_shards.py: figures of shards whose documents are known."""
import numpy as np
import pytest

import inspect_shards
from inspect_shards import documents, inspect, main, no_text_share
from prepare import prepare
from test_data_prep import assert_one_sentence, contents, lorem
from test_foreign_shards import npy, raw, text_like
from token_data import read_manifest


@pytest.fixture
def folder(tmp_path):
    """60 documents, three of them twice, of 100 to 159 bytes, each with its copy on the same side."""
    for number in range(60):
        text = lorem(number, 100).encode()[:90].decode(errors="ignore")
        (tmp_path / f"{number:02d}.txt").write_text(text.ljust(100 + number, "x"))
    for number in range(3):
        (tmp_path / f"copy{number}.txt").write_bytes((tmp_path / f"{number:02d}.txt").read_bytes())
    prepare([tmp_path], tmp_path / "out", encoding="bytes", val_fraction=0.3, shard_tokens=1000)
    return tmp_path / "out"


def test_figures(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect_shards, "BLOCK", 77)       # documents run over blocks and shards
    before = contents(folder)
    splits = inspect(folder, samples=3, picture=tmp_path / "lengths.png")
    assert contents(folder) == before
    entries = read_manifest(folder)["splits"]
    for name, split in splits.items():
        assert len(split.lengths) == entries[name]["documents"] and sum(split.lengths) == entries[name]["bytes"]
    assert sum(split.duplicates() for split in splits.values()) == 3
    printed = capsys.readouterr().out
    assert "documents of val that are also in train: 0\n" in printed and "0.000% in a sample of 63" in printed
    assert printed.count("train, document ") == printed.count("val, document ") == 3
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_documents_that_train_and_val_share(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    npy(tmp_path / "theirs" / "a_train_1.npy", [50256, 5, 6, 7, 50256, 8, 9, 50256, 5, 6, 7])
    npy(tmp_path / "theirs" / "a_val_0.npy", [50256, 8, 9, 50256, 4])
    splits = inspect(tmp_path / "theirs")
    assert list(splits["train"].lengths) == [3, 2, 3] and list(splits["val"].lengths) == [2, 1]
    assert splits["train"].duplicates() == 1 and "also in train: 1 (the" in capsys.readouterr().out
    assert (tmp_path / "theirs-lengths.png").exists()


def test_files_without_separators(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect_shards, "LONGEST", 4000)
    monkeypatch.setattr(inspect_shards, "BLOCK", 1000)
    for name in ("train", "val"):
        raw(tmp_path / f"{name}.bin", text_like(1, 10_000, 65))
    found = list(documents(tmp_path, read_manifest(tmp_path), "train"))
    assert [len(ids) for ids in found] == [4000, 4000, 2000]
    assert (np.concatenate(found) == text_like(1, 10_000, 65)).all()
    inspect(tmp_path, picture=tmp_path / "a.png")
    assert "shown as token ids" in capsys.readouterr().out


def test_what_is_no_text():
    assert no_text_share(["plain text,\n\t中文 é ✓", "", "cut off \ufffd"]) == 0
    assert no_text_share(["\0\1\2x"]) == 0.75 and no_text_share(["a\ufffdb\ue000"]) == 0.5


def test_a_folder_that_is_none(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert_one_sentence(capsys.readouterr().err.removeprefix("error: ")[:-1], "no finished shard folder")
