"""Token files of nanoGPT, llm.c and build-nanogpt, written here from the descriptions of their formats, read as they
are; and everything that is none of them, refused with what was seen."""
import json
import os
import tempfile

import numpy as np
import pytest

import foreign_shards
from foreign_shards import describe, has_token_files, split_of
from prepare import find_or_prepare
from runtime import UserError
from token_data import open_shards, train_batch, verify_hashes
from test_token_data import assert_one_sentence, contents


@pytest.fixture(autouse=True)
def findings(tmp_path_factory, monkeypatch):
    """The temporary folder, in which findings are kept, is this test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    return tempfile.gettempdir()


def text_like(seed: int, count: int, vocabulary: int = 50257) -> np.ndarray:
    """Ids as unequal as those of a text: few come often; the separator among them."""
    ids = np.random.default_rng(seed).zipf(1.3, count) % (vocabulary - 1)
    ids[::97], ids[50] = vocabulary - 1, vocabulary - 2
    return ids


def raw(path, ids, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.asarray(ids).astype(dtype).tobytes())


def llm_c(path, ids, dtype="<u2", magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(dtype).tobytes())


def npy(path, ids, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.asarray(ids).astype(dtype))


def llama3(path, ids):
    llm_c(path, ids, "<u4", 20240801, 7)


# name: (write, vocabulary, train files, val files, encoding)
KINDS = {
    "nanoGPT": (raw, 50257, ["train.bin"], ["val.bin"], "gpt2"),
    "nanoGPT of characters": (raw, 65, ["train.bin"], ["val.bin"], "unknown"),
    "raw uint32": (lambda path, ids: raw(path, ids, "<u4"), 100_277, ["train.bin"], ["val.bin"], "unknown"),
    "llm.c": (llm_c, 50257, ["TinyStories_train.bin"], ["TinyStories_val.bin"], "gpt2"),
    "modded-nanogpt": (llm_c, 50257, ["fineweb_train_000001.bin", "fineweb_train_000002.bin"],
                       ["fineweb_val_000000.bin"], "gpt2"),
    "llm.c for Llama 3": (llama3, 128_256, ["x_train_000001.bin"], ["x_val_000000.bin"], "llama3"),
    "build-nanogpt": (npy, 50257, ["edufineweb_train_000001.npy", "edufineweb_train_000002.npy"],
                      ["edufineweb_val_000000.npy"], "gpt2"),
    "npy int32": (lambda path, ids: npy(path, ids, "<i4"), 50257, ["a_train_0.npy"], ["a_val_0.npy"], "gpt2"),
    "folders train and val": (npy, 50257, ["train/shard_0.npy", "train/shard_1.npy"], ["val/shard_0.npy"], "gpt2"),
    "validation.bin": (raw, 50257, ["train.bin"], ["validation.bin"], "gpt2"),
}


def write_kind(kind, folder):
    write, vocabulary, train, val, _ = KINDS[kind]
    ids = {name: text_like(number, 9000 + number, vocabulary) for number, name in enumerate(train + val)}
    for name, content in ids.items():
        write(folder / name, content)
    return [ids[name] for name in train], [ids[name] for name in val]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_others_are_read_as_they_are(tmp_path, kind, capsys):
    _, vocabulary, _, _, encoding = KINDS[kind]
    folder = tmp_path / "theirs"
    train, val = write_kind(kind, folder)
    before = contents(folder)
    shards = open_shards(folder, T=100)
    assert (shards.encoding, shards.vocab_size) == (encoding, vocabulary)
    assert shards.train.tokens == sum(map(len, train)) and shards.val.tokens == len(val[0])
    for split, ids in ((shards.train, train), (shards.val, val)):
        windows = [part[start:start + 101] for part in ids for start in range(0, len(part) - 100, 100)]
        x, y = split.windows_at(range(split.windows))
        assert x.tolist() == [window[:-1].tolist() for window in windows]
        assert y.tolist() == [window[1:].tolist() for window in windows]
    verify_hashes(folder)
    assert shards.bytes_per_token("train") is shards.per_byte(3.0) is None
    assert encoding.replace("unknown", "not known") in capsys.readouterr().out and contents(folder) == before


def test_every_token_file_is_read_once_and_a_changed_one_again(tmp_path, capsys, findings):
    folder = tmp_path / "theirs"
    write_kind("modded-nanogpt", folder)
    first = open_shards(folder, T=8).manifest
    assert "llm.c token files" in capsys.readouterr().out
    assert open_shards(folder, T=8).manifest == first and capsys.readouterr().out == ""
    llm_c(folder / "fineweb_train_000002.bin", text_like(9, 9001))
    second = open_shards(folder, T=8).manifest
    assert second["splits"]["train"] != first["splits"]["train"] and second["splits"]["val"] == first["splits"]["val"]
    os.rename(folder, tmp_path / "moved")       # the same content elsewhere is the same data, for a resume
    assert open_shards(tmp_path / "moved", T=8).manifest["splits"] == second["splits"]


def test_without_a_place_to_keep_findings(tmp_path, findings):
    write_kind("nanoGPT", tmp_path / "theirs")
    (tmp_path / "file").write_text("")
    tempfile.tempdir = str(tmp_path / "file")
    assert open_shards(tmp_path / "theirs", T=8).train.tokens == 9000


@pytest.mark.parametrize("name, split", [
    ("edufineweb_val_000000", "val"), ("fineweb_train_000001", "train"), ("training_args", None), ("model", None),
    ("pretrain_val", "val"), ("Valid-3", "val"), ("train val", "train"), ("constrained", None)])
def test_split_of_a_name(name, split):
    assert split_of(name) == split


def cut(path, size):
    os.truncate(path, size)


def zeros(where):
    ids = text_like(0, 60_000)
    ids[where:where + 9000] = 0
    return ids


WEIGHTS = np.random.default_rng(0).normal(0, 0.02, 200_000)
NOISE = np.random.default_rng(0).integers(0, 65536, 100_000)
WRONG = {
    "odd length": (lambda f: (f / "train.bin").write_bytes(b"\1" * 1001), "1,001 bytes, no whole number of uint16"),
    "text": (lambda f: (f / "train.bin").write_bytes(b"First Citizen:\nBefore we proceed any further, hear me. " * 99),
             "is text, not tokens (it holds"),
    "noise": (lambda f: raw(f / "train.bin", NOISE), "looks like noise"),
    "noise in npy": (lambda f: npy(f / "train.npy", NOISE), "looks like noise"),
    "fp16 weights": (lambda f: (f / "train.bin").write_bytes(WEIGHTS.astype("<f2").tobytes()), "looks like noise"),
    "fp32 weights": (lambda f: (f / "train.bin").write_bytes(WEIGHTS.astype("<f4").tobytes()), "looks like noise"),
    "pixels": (lambda f: (f / "train.bin").write_bytes((WEIGHTS * 2000 + 120).astype(np.uint8).tobytes()), "noise"),
    "int64": (lambda f: raw(f / "train.bin", text_like(0, 5000), "<i8"), "looks like int64"),
    "hole": (lambda f: raw(f / "train.bin", zeros(30_000)), "nothing but zeros for 4,096 tokens from token"),
    "unfilled end": (lambda f: raw(f / "train.bin", zeros(51_000)), "(of 60,000)"),
    "hole in llm.c": (lambda f: llm_c(f / "a_train.bin", zeros(0)), "from token 0 on"),
    "llm.c cut short": (lambda f: llm_c(f / "a_train.bin", text_like(0, 5000), count=6000),
                        "11,024 bytes where its header says 13,024 (6,000 tokens of uint16)"),
    "llm.c of next version": (lambda f: llm_c(f / "a_train.bin", text_like(0, 5000), version=2), "version 2"),
    "llm.c questions": (lambda f: llm_c(f / "hellaswag_train.bin", text_like(0, 5000), magic=20240522),
                        "test questions"),
    "npy cut short": (lambda f: (npy(f / "train.npy", text_like(0, 5000)), cut(f / "train.npy", 9000)),
                      "9,000 bytes where its header says 10,128"),
    "npy of floats": (lambda f: npy(f / "train.npy", np.ones(5000), "<f4"), "float32 in the shape (5000,)"),
    "npy of int64": (lambda f: npy(f / "train.npy", np.ones(5000), "<i8"), "int64"),
    "npy of images": (lambda f: npy(f / "train.npy", np.ones((50, 28, 28))), "(50, 28, 28)"),
    "npy of other byte order": (lambda f: npy(f / "train.npy", np.ones(5000), ">u2"), ">u2"),
    "npy negative": (lambda f: npy(f / "train.npy", -text_like(0, 5000), "<i4"), "no token id"),
    "npy of objects": (lambda f: np.save(f / "train.npy", np.array([{}], object), allow_pickle=True), "object"),
    "no npy at all": (lambda f: (f / "train.npy").write_bytes(b"PK" * 500), "no .npy file"),
    "empty npy": (lambda f: (f / "train.npy").write_bytes(b""), "no .npy file"),
    "empty": (lambda f: (f / "train.bin").write_bytes(b""), "train has 0 tokens"),
    "too short": (lambda f: raw(f / "train.bin", [50256, 5, 6, 7]), "train has 4 tokens, needs at least 9"),
    "ids that the model has not": (lambda f: raw(f / "train.bin", [*text_like(0, 5000), 50_300]),
                                   "token id 50,300 but the model has only 50,257 ids"),
    "uint32 ids that the model has not": (lambda f: raw(f / "train.bin", [*text_like(0, 5000, 100_277)], "<u4"),
                                          "token id 100,276"),
    "no val": (lambda f: (raw(f / "train.bin", text_like(0, 5000)), (f / "val.bin").unlink()),
               "train.bin, but no name says val"),
    "no split at all": (lambda f: (f / "val.bin").rename(f / "shard_0.bin"), "no name says train and none says val"),
    "two tokenizers": (lambda f: (llama3(f / "b_train.bin", text_like(0, 5000)), llm_c(f / "a_train.bin", [1, 2, 3])),
                       "mixes files of several tokenizers"),
    "own shards without manifest": (lambda f: (raw(f / "train_00000.bin", text_like(0, 5000)),
                                               (f / "val.bin").rename(f / "val_00000.bin")), "no manifest.json"),
    "no token files": (lambda f: (f / "val.bin").rename(f / "val.zip"), "no token files of nanoGPT, llm.c or .npy"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_token_file_is_refused_with_what_was_seen(tmp_path, case):
    change, words = WRONG[case]
    raw(tmp_path / "theirs" / "val.bin", text_like(1, 9000))
    change(tmp_path / "theirs")
    before = contents(tmp_path)
    with pytest.raises(UserError) as error:
        open_shards(tmp_path / "theirs", T=8, vocab_size=50_257)
    text = str(error.value)
    assert words in text and str(tmp_path) in text and "\n" not in text and text.endswith(".") and len(text) < 500
    assert contents(tmp_path) == before


def test_kaggle_inputs_are_searched_for_all_kinds(tmp_path, capsys):
    inputs, out = tmp_path / "input", tmp_path / "out"
    deep = inputs / "datasets" / "somebody" / "edu-fineweb10b" / "edu_fineweb10B"
    write_kind("build-nanogpt", deep)
    npy(inputs / "mnist" / "x_train.npy", np.ones((50, 28, 28)))      # looks like it by name only
    npy(inputs / "mnist" / "x_val.npy", np.ones((50, 28, 28)))
    raw(inputs / "bert" / "pytorch_model.bin", NOISE)
    assert find_or_prepare("auto", inputs=inputs, out=out) == str(deep)
    assert find_or_prepare(str(deep), inputs=inputs, out=out) == str(deep) and not out.exists()
    write_kind("nanoGPT", inputs / "other")
    with pytest.raises(UserError) as error:
        find_or_prepare("auto", inputs=inputs, out=out)
    assert_one_sentence(error, str(deep), str(inputs / "other"))
    raw(inputs / "other" / "train.bin", NOISE)          # named by the user: refused when it is opened, not passed over
    named = find_or_prepare(str(inputs / "other"), inputs=inputs, out=out)
    with pytest.raises(UserError, match="noise"):
        open_shards(named, T=8)


def test_a_long_look_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    write_kind("modded-nanogpt", tmp_path)
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(foreign_shards.time, "monotonic", lambda: next(clock))
    describe(tmp_path)
    assert capsys.readouterr().out.count("once: ") == 3


def test_a_gpt_trains_from_the_files_of_others(tmp_path, capsys):
    import train_gpt
    write_kind("nanoGPT of characters", tmp_path / "theirs")
    config = train_gpt.make_config("tiny", data_folder=str(tmp_path / "theirs"), run_folder=str(tmp_path / "run"),
                                   max_steps=4, eval_every=2, save_every=4)
    folder = train_gpt.launch(config)
    printed = capsys.readouterr().out
    assert "validation loss in nats per token" in printed, printed
    assert ">>>[" in (folder / "samples.txt").read_text()       # as token ids: nobody knows the tokenizer
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    losses = [record for record in records if "val_loss" in record]
    assert len(losses) == 3 and all(record["val_nats_per_byte"] is None for record in losses)
    assert has_token_files(tmp_path / "theirs", look=True) and not has_token_files(folder)
    x, _ = train_batch(open_shards(tmp_path / "theirs", T=32).train, 1337, 0, 8, slice(None))
    assert x.shape == (8, 32)
