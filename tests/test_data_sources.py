"""data_prep beyond plain text: tables and compressed files, datasets, Kaggle inputs, damaged documents, a budget of
tokens, and preparations that were killed and go on."""
import csv
import gzip
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

import preparation
import text_documents
import text_records
import vocabulary_files
from prepare import find_or_prepare, main, prepare
from runtime import UserError
from shard_writer import SplitWriter, save_progress, saved_progress, unfinished_folder
from text_documents import Damage, read_documents
from text_encodings import get_encoding
from text_sources import find_texts
from token_data import open_shards, read_manifest, verify_hashes
from test_data_prep import (VOCABULARY, assert_one_sentence, bare_machine, contents, lorem, no_network,  # noqa: F401
                            own_r50k, tokens_of)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [lorem(number, 300 + 50 * number) for number in range(60)]


def as_jsonl(texts, column="text") -> bytes:
    return "".join(json.dumps({"id": 7, column: text, "url": "x"}) + "\n" for text in texts).encode()


def as_csv(texts, column="text") -> bytes:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["id", column, "url"])
    writer.writerows([7, text, "x"] for text in texts)
    return stream.getvalue().encode()


def as_parquet(texts, column="text") -> bytes:
    import pyarrow
    import pyarrow.parquet
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"id": [7] * len(texts), column: texts, "url": ["x"] * len(texts)})
    pyarrow.parquet.write_table(table, sink, row_group_size=25)
    return sink.getvalue().to_pybytes()


def zst(content: bytes) -> bytes:
    import zstandard
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


TABLES = {"jsonl": as_jsonl, "ndjson": as_jsonl, "csv": as_csv, "parquet": as_parquet}
COMPRESSED = {"": bytes, ".gz": gzip.compress, ".zst": zst}
FILES = [kind + suffix for kind in TABLES for suffix in COMPRESSED if kind != "parquet" or not suffix]


def documents_of(sources, column="text", val_fraction=0.2, damage=None) -> list:
    files, _, _ = find_texts(sources, column=column)
    return [document for file in files for document in read_documents(file, val_fraction, column, damage)]


# ---- tables and compressed files -------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", FILES)
def test_tables_give_their_column(tmp_path, name):
    kind, _, suffix = name.partition(".")
    path = tmp_path / f"a.{name.upper()}"
    path.write_bytes(COMPRESSED["." + suffix if suffix else ""](TABLES[kind](TEXTS, "body")))
    found = documents_of([path], "body")
    assert [document.text for document in found] == TEXTS
    splits = [document.split for document in found]
    assert 4 < splits.count("val") < 24
    (tmp_path / "more.jsonl").write_bytes(as_jsonl(TEXTS[::-1] + [lorem(999, 300)], "body"))
    after = {document.text: document.split for document in documents_of([tmp_path], "body")}
    assert [after[text] for text in TEXTS] == splits        # another file, order and kind move no document


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("size", [500, 400_000])
def test_compressed_text_is_the_same_text(tmp_path, suffix, size):
    text = lorem(5, size).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / f"a.txt{suffix}").write_bytes(COMPRESSED[suffix](text))
    plain, packed = (documents_of([tmp_path / name]) for name in ("a.txt", f"a.txt{suffix}"))
    assert [(d.text, d.split) for d in plain] == [(d.text, d.split) for d in packed]
    assert len(plain) == 1 + (size > 500) * 24


def test_a_folder_of_everything(tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    for number, name in enumerate(FILES):
        kind, _, suffix = name.partition(".")
        content = TABLES[kind]([f"{number} {text}" for text in TEXTS[:9]])
        (folder / f"a.{name}").write_bytes(COMPRESSED["." + suffix if suffix else ""](content))
    (folder / "b.md.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    (folder / "prices.csv").write_text("day,price\n1,2\n")
    manifest = prepare([folder], tmp_path / "out", encoding="bytes")
    verify_hashes(tmp_path / "out")
    counts = [manifest["splits"][name]["documents"] for name in ("train", "val")]
    assert sum(counts) == 9 * len(FILES) + 1 and manifest["damaged"] == {"counts": {}, "listed": []}
    assert [entry["reason"] for entry in manifest["skipped"]] == [
        "has no column 'text', but day, price: name one as column"]
    with pytest.raises(UserError) as error:
        prepare([folder], tmp_path / "out", encoding="bytes", column="url")
    assert_one_sentence(error.value, "already holds", "column")


def test_column_that_is_not_there(tmp_path):
    for kind, make in TABLES.items():
        (tmp_path / f"a.{kind}").write_bytes(make(TEXTS, "body"))
        with pytest.raises(UserError) as error:
            prepare([tmp_path / f"a.{kind}"], tmp_path / "out", encoding="bytes")
        assert_one_sentence(error.value, "no column 'text', but id, body, url", f"a.{kind}")
    options = ["--column", "body", "--out", str(tmp_path / "out"), "--encoding", "bytes"]
    assert main([str(tmp_path / "a.csv"), *options]) == 0


@pytest.mark.parametrize("package, name", [("pyarrow", "a.parquet"), ("zstandard", "a.txt.zst"),
                                           ("datasets", "hf:a/b")])
def test_optional_package_that_is_missing(tmp_path, monkeypatch, package, name):
    (tmp_path / "a.parquet").write_bytes(as_parquet(TEXTS))
    (tmp_path / "a.txt.zst").write_bytes(zst(b"text " * 99))
    for loaded in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)     # what Python does for a package that is not there
    with pytest.raises(UserError) as error:
        prepare([name if name.startswith("hf:") else tmp_path / name], tmp_path / "out", encoding="bytes")
    assert_one_sentence(error.value, name, f"needs the package {package}", f"pip install {package}")


# ---- Hugging Face datasets and Kaggle inputs -------------------------------------------------------------------------

@pytest.fixture
def offline_datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("datasets")


def test_dataset_saved_to_disk(tmp_path, offline_datasets):
    dataset = offline_datasets.Dataset.from_dict({"id": range(60), "text": TEXTS})
    dataset.save_to_disk(tmp_path / "one")
    offline_datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        assert [document.text for document in documents_of([tmp_path / name])] == TEXTS
    manifest = prepare([tmp_path / "one"], tmp_path / "out", encoding="bytes", val_fraction=0.2)
    assert manifest["sources"][0]["bytes"] > sum(map(len, TEXTS))
    again = prepare([tmp_path / "two"], tmp_path / "out2", encoding="bytes", val_fraction=0.2)
    assert again["splits"] == manifest["splits"]


def test_dataset_is_streamed_up_to_a_budget(tmp_path, offline_datasets, monkeypatch):
    """hf: takes whatever load_dataset takes; a local folder instead of a name on the hub needs no network."""
    folder = tmp_path / "local"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(as_jsonl(TEXTS))
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 3000)
    ids = [len(text.encode()) + 1 for text in TEXTS]
    manifest = prepare(f"hf:{folder}", tmp_path / "out", encoding="bytes", val_fraction=0.3, max_tokens=20_000)
    tokens = [manifest["splits"][name]["tokens"] for name in ("train", "val")]
    documents = [manifest["splits"][name]["documents"] for name in ("train", "val")]
    assert sum(tokens) == sum(ids[:sum(documents)]) >= 20_000 > sum(ids[:sum(documents) - 1])
    with pytest.raises(UserError) as error:
        prepare("hf:no/such-dataset", tmp_path / "none", encoding="bytes")
    assert_one_sentence(error.value, "hf:no/such-dataset", "internet")


def test_disk_is_checked_for_the_budget_of_a_stream(tmp_path, offline_datasets, monkeypatch):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_bytes(as_jsonl(TEXTS))
    source = f"hf:{tmp_path / 'local'}"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=5_000_000))
    with pytest.raises(UserError) as error:
        prepare(source, tmp_path / "out", encoding="bytes", max_tokens=10 ** 9)
    assert_one_sentence(error.value, "need about 2,041 MB", "5 MB free")
    assert prepare(source, tmp_path / "out", encoding="bytes", val_fraction=0.3)["splits"]["val"]["documents"]


def test_budget_does_not_depend_on_the_batches(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(TEXTS))
    results = []
    for size in (500, 5000, 5_000_000):
        monkeypatch.setattr(preparation, "BATCH_CHARACTERS", size)
        out = tmp_path / str(size)
        prepare([tmp_path / "a.jsonl"], out, encoding="bytes", val_fraction=0.3, max_tokens=30_000)
        results.append({path.name: content for path, content in contents(out).items()})
    assert results[0] == results[1] == results[2]


def test_kaggle_inputs_are_found_by_name_wherever_they_are(tmp_path, monkeypatch):
    inputs = tmp_path / "input"
    place = inputs / "datasets" / "somebody" / "my-books"
    place.mkdir(parents=True)
    (place / "books.jsonl").write_bytes(as_jsonl(TEXTS))
    monkeypatch.setattr(vocabulary_files, "INPUTS", inputs)
    for name in ("my-books", "/kaggle/input/my-books", "/kaggle/input/my-books/books.jsonl", place):
        assert [document.text for document in documents_of([name])] == TEXTS
    folder = find_or_prepare("my-books", "bytes", inputs=inputs, out=tmp_path / "out")
    assert open_shards(folder, T=16).train.tokens > 10_000
    with pytest.raises(UserError, match="no file or folder"):
        find_texts(["/kaggle/input/other"])
    (place / "my-books").mkdir()            # inside the first: no other one
    assert len(documents_of(["my-books"])) == len(TEXTS)
    (inputs / "my-books").mkdir()
    with pytest.raises(UserError) as error:
        find_texts(["my-books"])
    assert_one_sentence(error.value, str(place), str(inputs / "my-books"))


# ---- damaged documents -----------------------------------------------------------------------------------------------

def test_damaged_records_are_skipped_mended_or_cut_counted_and_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_records, "LONGEST_LINE", 20_000)
    lines = as_jsonl(TEXTS).splitlines()
    lines[3:3] = [b"{half", b'{"text": "caf\xe9"}', b"[1]", b'{"text": 5}', b'{"other": "x"}', b"", b'{"text": ""}',
                  b'{"text": "lone \\ud800 surrogate"}', as_jsonl(["y" * 30_000]), b"[" * 9000,
                  as_jsonl([" " * 9000 + "end"]).strip()]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    manifest = prepare([tmp_path / "a.jsonl"], tmp_path / "out", encoding="gpt2", val_fraction=0.2)
    assert manifest["damaged"]["counts"] == {
        "a line of more than 20,000 bytes, skipped": 1, "bad bytes, skipped": 1, "endless run, encoded in parts": 1,
        "lone surrogates, replaced": 1, "no JSON, skipped": 2, "no text, skipped": 4}
    listed = {entry["document"]: entry["reason"] for entry in manifest["damaged"]["listed"]}
    assert len(listed) == 10 and listed["a.jsonl, record 4"] == "no JSON, skipped"
    texts = "".join(get_encoding("gpt2").decode(tokens_of(tmp_path / "out", name)) for name in ("train", "val"))
    assert all(text in texts for text in [*TEXTS, "lone \ufffd surrogate", " " * 9000 + "end"])
    assert "y" * 99 not in texts
    assert sum(split["documents"] for split in manifest["splits"].values()) == 62
    printed = capsys.readouterr().out
    assert "damaged documents: 1 x a line of more" in printed and "such as a.jsonl, record 4" in printed


def test_damaged_rows_of_csv_and_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet
    rows = as_csv(TEXTS).split(b"\r\n")
    rows[2:2] = [b"7", b"7,caf\xe9,x", b"", b'7,"",x', b"7," + b"z" * 300_000 + b",x"]
    (tmp_path / "a.csv").write_bytes(b"\r\n".join(rows))
    damage = Damage()
    found = documents_of([tmp_path / "a.csv"], damage=damage)
    assert [document.text for document in found if document.text[:2] != "zz"] == TEXTS and len(found) == 61
    assert damage.counts == {"no text, skipped": 2, "bad bytes, skipped": 1}
    bad = pyarrow.array([b"good", b"\xff", None, b"more"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "b.parquet")
    damage = Damage()
    assert [document.text for document in documents_of([tmp_path / "b.parquet"], damage=damage)] == ["good", "more"]
    assert damage.counts == {"no text, skipped": 1, "bad bytes, skipped": 1}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.jsonl.zst", "a.csv.zst", "a.parquet",
                                  "a.txt.gz", "a.txt.zst"])
def test_file_that_breaks_off_loses_its_rest_only(tmp_path, name):
    kind, _, suffix = name[2:].partition(".")
    texts = [lorem(number, 3000) for number in range(200)]
    make = TABLES.get(kind, lambda texts: "".join(texts).encode())
    content = COMPRESSED["." + suffix if suffix else ""](make(texts))
    (tmp_path / name).write_bytes(content[:len(content) // 2])
    (tmp_path / "good.txt").write_bytes("".join(TEXTS * 9).encode())
    manifest = prepare([tmp_path], tmp_path / "out", encoding="bytes", val_fraction=0.2)
    if kind in ("parquet", "txt"):
        assert "damaged" in manifest["skipped"][0]["reason"]
        return
    total = sum(split["documents"] for split in manifest["splits"].values())
    assert total > 60 and list(manifest["damaged"]["counts"].values()) == [1]


def test_bad_bytes_in_a_long_file_cost_their_piece(tmp_path):
    text = lorem(8, 400_000).encode()
    (tmp_path / "a.txt").write_bytes(text[:200_000] + b"\xff\xfe" + text[200_000:])
    damage = Damage()
    found = documents_of([tmp_path / "a.txt"], damage=damage)
    assert damage.counts == {"bad bytes, skipped": 1} and damage.listed[0]["document"].startswith("a.txt, piece ")
    kept = sum(len(document.text.encode()) for document in found)
    assert len(text) - 40_000 < kept < len(text)


def test_record_longer_than_a_document_is_cut_within_one_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text_documents, "LONGEST_DOCUMENT", 1000)
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["a" * 3500, "b" * 1000]))
    damage = Damage()
    found = documents_of([tmp_path / "a.jsonl"], damage=damage)
    assert [len(document.text) for document in found] == [1000, 1000, 1000, 500, 1000]
    assert len({document.split for document in found[:4]}) == 1 and list(damage.counts.values()) == [1]


def test_only_the_first_damages_are_listed():
    damage = Damage()
    for number in range(500):
        damage.add(f"record {number}", "no text")
    assert damage.counts == {"no text": 500} and len(damage.listed) == text_documents.LISTED


# ---- killed and gone on ----------------------------------------------------------------------------------------------

@pytest.fixture
def corpus(tmp_path) -> Path:
    """Every kind of source, with damage, in 2.6 MB."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(4):
        texts = [lorem(1000 * number + i, 2000) for i in range(100)]
        lines = as_jsonl(texts).splitlines()
        lines[5:5], lines[90:90] = [b"{half", b'{"text": "\\ud800"}'], [b"{half"]
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n{"))
        (folder / f"{number}.parquet").write_bytes(as_parquet(texts[::-1]))
        (folder / f"{number}.txt").write_bytes(lorem(77 + number, 200_000).encode() + b"\xff" + b" " * 10_000)
    return folder


PATHS = os.pathsep.join(str(ROOT / name) for name in ("py", "data_prep"))
PREPARE = """if True:
    import sys, preparation, prepare, shard_writer
    preparation.BATCH_CHARACTERS, preparation.NOTE_EVERY = 30_000, 0.0
    sys.exit(prepare.main(sys.argv[1:]))"""


def start(corpus, out, *options) -> subprocess.Popen:
    command = [sys.executable, "-c", PREPARE, corpus, "--out", out, "--encoding", "gpt2", "--shard-tokens", "40000",
               "--val-fraction", "0.2", *options]
    return subprocess.Popen(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": PATHS})


@pytest.mark.parametrize("options", [[], ["--max-tokens", "700000"], ["--max-bytes", "2000000"]])
def test_killed_again_and_again_equals_unbroken_byte_for_byte(corpus, tmp_path, options):
    assert start(corpus, tmp_path / "unbroken", *options).wait() == 0
    out, chance, went_on, kills = tmp_path / "out", np.random.default_rng(), 0, 0
    while not out.exists():
        process, noted = start(corpus, out, *options), time.monotonic() + 60
        before = [path.stat().st_mtime_ns for path in tmp_path.glob(".out.*/progress.json")]
        while process.poll() is None and time.monotonic() < noted and kills < 3:      # until it has noted something new
            now = [path.stat().st_mtime_ns for path in tmp_path.glob(".out.*/progress.json")]
            if now and now != before:
                time.sleep(chance.uniform(0, 0.15))
                process.kill()
                kills += 1
                break
            time.sleep(0.001)
        went_on += "going on where" in process.communicate()[0]
        assert len(list(tmp_path.glob(".out.*"))) <= 1
    assert went_on >= 1
    verify_hashes(out)
    for path, content in contents(tmp_path / "unbroken").items():
        assert (out / path.name).read_bytes() == content, path.name
    assert sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "unbroken")) and not list(tmp_path.glob(".out.*"))


def test_another_request_does_not_go_on_from_it(tmp_path):
    for request, other in (({"text": "a"}, {"text": "b"}), ({"text": "a"}, {"text": "a", "shard_tokens": 5})):
        with pytest.raises(KeyboardInterrupt), unfinished_folder(tmp_path / "out", request) as folder:
            save_progress(folder, request, {"place": 1})
            raise KeyboardInterrupt
        assert saved_progress(folder, request) == {"place": 1} and saved_progress(folder, other) is None
        with pytest.raises(KeyboardInterrupt), unfinished_folder(tmp_path / "out", other) as new:
            assert new != folder and not folder.exists()
            raise KeyboardInterrupt
        assert not list(tmp_path.iterdir())


def test_progress_that_somebody_holds_is_left_to_him(tmp_path):
    request = {"text": "a"}
    with unfinished_folder(tmp_path / "out", request) as mine:
        save_progress(mine, request, {"place": 1})
        with pytest.raises(KeyboardInterrupt), unfinished_folder(tmp_path / "out", request) as other:
            assert other != mine and saved_progress(other, request) is None
            raise KeyboardInterrupt
        assert saved_progress(mine, request)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_damaged_notes_are_a_new_beginning(tmp_path):
    for content in ("", "{", "[]", '{"request": 5}'):
        (tmp_path / "progress.json").write_text(content)
        assert saved_progress(tmp_path, {"text": "a"}) is None


def test_writer_goes_on_in_the_middle_of_a_shard(tmp_path):
    ids = np.arange(1000) % 257
    writer = SplitWriter(tmp_path, "train", 257, shard_tokens=300)
    writer.add(ids[:700], 700, 1)
    state = json.loads(json.dumps(writer.state()))
    writer.add(ids[:250], 250, 1)           # lost by the kill
    writer.state()
    second = SplitWriter(tmp_path, "train", 257, shard_tokens=300)
    second.restore(state)
    second.add(ids[700:], 300, 1)
    entry = second.finish()
    written = np.concatenate([np.fromfile(tmp_path / shard["file"], "<u2") for shard in entry["shards"]])
    assert written.tolist() == ids.tolist() and [shard["tokens"] for shard in entry["shards"]] == [300, 300, 300, 100]
    (tmp_path / "whole").mkdir()
    whole = SplitWriter(tmp_path / "whole", "train", 257, shard_tokens=300)
    whole.add(ids, 1000, 2)
    assert whole.finish()["shards"] == entry["shards"]


def test_disk_that_fills_up_keeps_what_is_done(corpus, tmp_path):
    """The system refuses files above a size, as a full disk does; with room again the same request goes on."""
    code = PREPARE.replace("import sys,", "import resource, sys,").replace(
        "sys.exit", "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, -1)); sys.exit")
    command = [sys.executable, "-c", code, str(corpus), "--out", str(tmp_path / "out"), "--encoding", "bytes",
               "--val-fraction", "0.2"]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATHS})
    assert process.returncode == 2, process
    assert_one_sentence(process.stderr.strip(), "could not be written", "what is done is kept")
    assert prepare([corpus], tmp_path / "out", encoding="bytes", val_fraction=0.2)
    prepare([corpus], tmp_path / "whole", encoding="bytes", val_fraction=0.2)
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "whole")


# ---- tiktoken's other encodings --------------------------------------------------------------------------------------

def test_another_encoding_from_a_file_of_any_name(bare_machine, own_r50k, tmp_path):
    shutil.copy(VOCABULARY, bare_machine.inputs / "somebodys.tiktoken")
    before, environment = contents(bare_machine.cache.parent), dict(os.environ)
    encoding = get_encoding("r50k_base")
    text = TEXTS[0] + "<|endoftext|>"
    assert encoding.name == "r50k_base" and encoding.encode_ordinary(text) == own_r50k.encode_ordinary(text)
    assert contents(bare_machine.cache.parent) == before and dict(os.environ) == environment


@pytest.mark.parametrize("name, file", [("cl100k_base", "cl100k_base"), ("o200k_harmony", "o200k_base"),
                                        ("p50k_edit", "p50k_base")])
def test_vocabulary_that_is_missing_is_named_with_its_places(bare_machine, name, file):
    (bare_machine.cache / f"{file}.tiktoken").write_bytes(b"other content")
    with pytest.raises(UserError) as error:
        get_encoding(name)
    assert_one_sentence(error.value, f"put {file}.tiktoken", "TIKTOKEN_CACHE_DIR", str(bare_machine.here), "Kaggle")
    assert (bare_machine.cache / f"{file}.tiktoken").read_bytes() == b"other content"


def test_hashes_and_names_are_those_that_tiktoken_expects():
    """Every vocabulary that this tiktoken knows is known here too: a new one is a line to add."""
    import inspect
    import tiktoken
    from tiktoken_ext import openai_public
    source = inspect.getsource(openai_public)
    assert set(tiktoken.list_encoding_names()) == {"gpt2", *vocabulary_files.VOCABULARY_FILES,
                                                   *vocabulary_files.SHARED_FILES}
    for file, sha256 in vocabulary_files.VOCABULARY_FILES.items():
        assert f'/{file}.tiktoken",\n        expected_hash="{sha256}"' in source
    assert vocabulary_files.cache_name("cl100k_base") == "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
