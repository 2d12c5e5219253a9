"""data_prep: ids against tiktoken's own, the vocabulary found and never harmed, every kind of bad text, preparations
that are killed, doubled, starved of disk. No network: opening a connection fails, except to this machine itself."""
import base64
import hashlib
import http.server
import importlib.util
import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import preparation
import shard_writer
import text_documents
import text_encodings
import vocabulary_files
from prepare import main, prepare
from runtime import UserError
from shard_writer import SplitWriter, already_prepared, unfinished_folder
from text_encodings import ByteEncoding, bounded_pieces, encode_documents, get_encoding, valid_text
from text_documents import LONG_FILE, is_held_out, read_documents
from text_sources import find_texts
from token_data import open_shards, read_manifest, verify_hashes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "data_prep" / "prepare.py"
WHISPER = importlib.util.find_spec("whisper")
assert WHISPER, "GPT-2's real vocabulary is needed: pip install --no-deps openai-whisper, which ships it"
VOCABULARY = Path(WHISPER.submodule_search_locations[0], "assets", "gpt2.tiktoken")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def connect(self, address, real=socket.socket.connect):
        assert address[0] == "127.0.0.1", f"the network was asked for {address}"
        return real(self, address)
    monkeypatch.setattr(socket.socket, "connect", connect)


def lorem(seed: int, size: int) -> str:
    """Lines of made-up words, as many characters as asked for."""
    chance, text, length = random.Random(seed), [], 0
    while length < size:
        word = "".join(chance.choices("abcdefghijklmnopqrstuvwxyzäß中", k=chance.randint(1, 9)))
        word += chance.choice("    .,\n")
        text.append(word)
        length += len(word)
    return "".join(text)[:size]


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    for number in range(40):
        path = folder / f"part{number % 3}" / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lorem(number, 2000))
    return folder


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(Path(folder).rglob("*"))}


def assert_one_sentence(text, *words):
    text = str(text)
    assert "\n" not in text and text.endswith(".") and 40 < len(text) < 600, text
    for word in words:
        assert word in text, text


def tokens_of(folder: Path, split: str) -> list[int]:
    manifest = read_manifest(folder)
    names = [shard["file"] for shard in manifest["splits"][split]["shards"]]
    return np.concatenate([np.fromfile(folder / name, "<u2") for name in names]).tolist()


def run(*arguments, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


# ---- encodings: ids --------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def own_r50k():
    """r50k_base loaded by tiktoken itself, from a cache folder with the real file under tiktoken's name for it."""
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        shutil.copy(VOCABULARY, Path(cache, "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"))
        patch.setenv("TIKTOKEN_CACHE_DIR", cache)
        return tiktoken.get_encoding("r50k_base")


def any_text(seed: int, size: int) -> str:
    chance = random.Random(seed)
    ranges = [(32, 127), (9, 14), (0, 128), (0x80, 0xD800), (0xE000, 0x110000), (0x4E00, 0x9FFF)]
    return "".join(chr(chance.randrange(*chance.choice(ranges))) for _ in range(size))


def test_gpt2_ids_are_tiktokens_own(own_r50k):
    encoding = get_encoding("gpt2")
    assert encoding.encode_ordinary("hello world") == [31373, 995]
    assert (encoding.name, encoding.n_vocab, encoding.eot_token) == ("gpt2", 50257, 50256)
    texts = [Path(os.__file__).read_text(), "'s \t\n  x", "", "<|endoftext|>", *(any_text(n, 3000) for n in range(5))]
    for text in texts:
        ids = encoding.encode_ordinary(text)
        assert ids == own_r50k.encode_ordinary(text) and encoding.decode(ids) == text
    assert [ids.tolist() for ids in encode_documents(encoding, texts)] == [
        own_r50k.encode_ordinary(text) + [50256] for text in texts]


def test_bytes_are_utf8(own_r50k):
    encoding = get_encoding("bytes")
    assert isinstance(encoding, tiktoken.Encoding) and (encoding.n_vocab, encoding.eot_token) == (257, 256)
    for text in [any_text(seed, 5000) for seed in range(5)] + ["", "\n", "é" * 1000]:
        for same in (encoding, ByteEncoding()):
            assert bytes(same.encode_ordinary(text)) == text.encode() and same.decode(list(text.encode())) == text
    assert encoding.decode([104, 105, 256]) == ByteEncoding().decode([104, 105, 256]) == "hi<|endoftext|>"
    assert encoding.decode([195, 104]) == ByteEncoding().decode([195, 104])
    assert ByteEncoding().encode_ordinary_batch(["a", "bc"], num_threads=2) == [[97], [98, 99]]


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("text", ["<|endoftext|>", "before <|endoftext|> after", "<|endofprompt|>", "", "plain"])
def test_special_text_is_ordinary_and_the_separator_comes_once(name, text):
    encoding = get_encoding(name)
    first, second = encode_documents(encoding, [text, "next"])
    assert (first == encoding.eot_token).sum() == (second == encoding.eot_token).sum() == 1
    assert first[-1] == encoding.eot_token and encoding.decode(first[:-1].tolist()) == text


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_surrogates_stop_nothing(name):
    encoding = get_encoding(name)
    ids = encode_documents(encoding, ["lone \ud800 pair \ud83d\ude00", "\udfff" * 10_000])
    assert encoding.decode(ids[0].tolist()[:-1]) == "lone \ufffd pair \U0001f600"
    assert encoding.decode(ids[1].tolist()[:-1]) == "\ufffd" * 10_000
    assert ByteEncoding().encode_ordinary("\ud800") == list("\ufffd".encode())


MILLION = 1_000_000
RUNS = {"spaces": "x" + " " * MILLION + "x", "newlines": "x" + "\n" * MILLION + "x", "one letter": "a" * MILLION,
        "tabs": "x" + " \t" * (MILLION // 2) + "x ", "two letters": "ab" * (MILLION // 2), "digits": "7" * MILLION,
        "signs": "=-" * (MILLION // 2), "chinese": "中文" * (MILLION // 2)}


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("run_of", RUNS)
def test_endless_runs_neither_overflow_nor_take_minutes(name, run_of):
    encoding, text, start = get_encoding(name), RUNS[run_of], time.monotonic()
    ids, = encode_documents(encoding, [text])
    assert encoding.decode(ids[:-1].tolist()) == text
    assert time.monotonic() - start < 10


def test_runs_are_bounded_and_ordinary_text_is_left_whole():
    limit = 2 * text_encodings.LONGEST_RUN
    chance = random.Random(0)
    for _ in range(100):
        lengths = chance.choices([1, 3, 2047, 2048, 5000], k=12)
        text = "".join(chance.choice([" ", "x", "\n", "中"]) * length for length in lengths)
        pieces = bounded_pieces(text)
        assert "".join(pieces) == text and all(pieces)
        assert max(len(word) for piece in pieces for word in piece.split() or [piece]) < limit
        assert all(len(piece) < limit for piece in pieces if piece.isspace())
    for text in (lorem(0, 100_000), "", "x" * 2047, " " * 2047):
        assert bounded_pieces(text) == ([text] if text else [])
    assert valid_text("a\ud800") == "a\ufffd"


# ---- encodings: the vocabulary file ----------------------------------------------------------------------------------

@pytest.fixture
def bare_machine(tmp_path, monkeypatch) -> types.SimpleNamespace:
    """No vocabulary anywhere; its folders are free to be filled."""
    names = ("cache", "gym", "inputs", "here", "temporary", "whisper")
    places = types.SimpleNamespace(**{name: tmp_path / name for name in names})
    for place in vars(places).values():
        place.mkdir()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(places.cache))
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(places.gym))
    monkeypatch.chdir(places.here)
    monkeypatch.setattr(tempfile, "tempdir", str(places.temporary))
    monkeypatch.setattr(vocabulary_files, "INPUTS", places.inputs)
    spec = types.SimpleNamespace(submodule_search_locations=[str(places.whisper)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "whisper" else None)
    return places


@pytest.fixture(scope="module")
def published_files() -> dict:
    """The three files in which GPT-2's vocabulary is published; two are rebuilt here, which their hashes prove."""
    tokens = [base64.b64decode(line.split()[0]) for line in VOCABULARY.read_bytes().splitlines()]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    letters = {tokens[i][0]: chr(tokens[i][0]) if i < 188 else chr(256 + i - 188) for i in range(256)}
    spell = lambda token: "".join(letters[byte] for byte in token)     # noqa: E731

    def merged_from(token: bytes) -> str:
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, math.inf) for a, b in zip(parts, parts[1:])]
            best = pairs.index(min(pairs))
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        return f"{spell(parts[0])} {spell(parts[1])}\n"

    merges = "#version: 0.2\n" + "".join(merged_from(token) for token in tokens[256:])
    ids = json.dumps({**{spell(token): rank for token, rank in ranks.items()}, "<|endoftext|>": 50256})
    files = {"r50k_base.tiktoken": VOCABULARY.read_bytes(), "vocab.bpe": merges.encode(), "encoder.json": ids.encode()}
    assert {hashlib.sha256(content).hexdigest() for content in files.values()} == set(vocabulary_files.READERS)
    return files


def test_each_published_file_alone_is_enough(bare_machine, published_files, own_r50k):
    text = any_text(9, 20_000)
    for name, content in published_files.items():
        (bare_machine.here / name).write_bytes(content)
        assert get_encoding("gpt2").encode_ordinary(text) == own_r50k.encode_ordinary(text), name
        (bare_machine.here / name).unlink()


CACHE_NAME = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"
PLACES = [f"cache/{CACHE_NAME}", "cache/r50k_base.tiktoken", "gym/gpt2.tiktoken", "here/r50k_base.tiktoken",
          f"temporary/data-gym-cache/{CACHE_NAME}", "inputs/some-data/version/1/gpt2.tiktoken",
          "whisper/assets/gpt2.tiktoken"]


@pytest.mark.parametrize("place", PLACES)
def test_vocabulary_is_found_by_several_names_in_several_places(bare_machine, place, capsys):
    path = bare_machine.cache.parent / place
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(VOCABULARY, path)
    before = contents(bare_machine.cache.parent)
    assert get_encoding("auto").encode_ordinary("hello world") == [31373, 995]
    assert "gpt2" in capsys.readouterr().out and contents(bare_machine.cache.parent) == before


@pytest.mark.parametrize("content", [b"", b"something else", VOCABULARY.read_bytes()[:-1], b"0" * 3_000_000])
def test_wrong_content_is_refused_and_left_where_it_is(bare_machine, content):
    for path in ("cache/0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4", "inputs/vocab.bpe"):
        (bare_machine.cache.parent / path).write_bytes(content)
    before = contents(bare_machine.cache.parent)
    with pytest.raises(UserError) as error:
        get_encoding("gpt2")
    assert_one_sentence(error.value, "0ea1e91b", "vocab.bpe", "other content", "r50k_base.tiktoken",
                        "TIKTOKEN_CACHE_DIR", str(bare_machine.here))
    assert contents(bare_machine.cache.parent) == before
    shutil.copy(VOCABULARY, bare_machine.here / "gpt2.tiktoken")        # a good one elsewhere still counts
    assert get_encoding("gpt2").n_vocab == 50257


def test_auto_without_vocabulary_is_bytes_and_says_so(bare_machine, capsys):
    assert get_encoding("auto").name == "bytes"
    assert "encoding: bytes (auto)" in capsys.readouterr().out


def test_unknown_encoding():
    with pytest.raises(UserError) as error:
        get_encoding("gpt3")
    assert_one_sentence(error.value, "'gpt3'", "gpt2 or auto")


def test_without_tiktoken(monkeypatch, texts, tmp_path):
    monkeypatch.setitem(sys.modules, "tiktoken", None)      # what Python does for a package that is not there
    with pytest.raises(UserError) as error:
        get_encoding("gpt2")
    assert_one_sentence(error.value, "needs the package tiktoken")
    plain = prepare([texts], tmp_path / "plain")
    monkeypatch.undo()
    assert plain == prepare([texts], tmp_path / "tiktoken", encoding="bytes")


def test_download_only_when_allowed_and_only_the_right_file(bare_machine, monkeypatch):
    asked = []

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            content = {"/good": VOCABULARY.read_bytes(), "/bad": b"<html>log in</html>"}.get(self.path)
            self.send_response(200 if content else 404)
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(vocabulary_files, "GPT2_URL", address + "/good")
    with pytest.raises(UserError):
        get_encoding("gpt2")
    assert not asked
    assert get_encoding("gpt2", allow_download=True).encode_ordinary("hello world") == [31373, 995]
    for path, word in (("/bad", "is not GPT-2's vocabulary"), ("/none", "could not be downloaded")):
        monkeypatch.setattr(vocabulary_files, "GPT2_URL", address + path)
        with pytest.raises(UserError) as error:
            get_encoding("gpt2", allow_download=True)
        assert_one_sentence(error.value, word)
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError):
        get_encoding("gpt2", allow_download=True)
    assert asked == ["/good", "/bad", "/none"] and not any(bare_machine.cache.iterdir())


# ---- sources ---------------------------------------------------------------------------------------------------------

def split_by_text(files, val_fraction) -> dict:
    return {document.text: document.split for file in files for document in read_documents(file, val_fraction)}


def test_folder_is_read_recursively_in_order_by_kind(texts):
    (texts / "notes.MD").write_text("m")
    (texts / "picture.png").write_text("no")
    (texts / ".hidden.txt").write_text("no")
    (texts / ".git").mkdir()
    (texts / ".git" / "config.txt").write_text("no")
    os.mkfifo(texts / "pipe.txt")       # opening it would wait for ever
    (texts / "loop.txt").symlink_to("loop.txt")
    (texts / "again").symlink_to(texts)
    files, skipped, _ = find_texts([texts])
    names = [file.name for file in files]
    assert names == sorted(names) and len(names) == 41 and {"part0/00.txt", "notes.MD"} < set(names)
    assert [Path(entry["file"]).name for entry in skipped] == ["loop.txt"] and "symbolic links" in skipped[0]["reason"]


def test_a_file_counts_once_however_it_is_named(texts):
    (texts / "link.txt").symlink_to("part0/00.txt")
    assert len(find_texts([texts, texts / "part0", texts / "part0" / "00.txt"])[0]) == 40


def test_what_is_no_text_is_skipped_with_its_reason(texts):
    bad = {"latin.txt": ("caf\xe9".encode("latin-1"), "UTF-8"), "cut.txt": ("中".encode()[:2], "UTF-8"),
           "late.txt": (b"x" * 3_000_000 + b"\xff" * 4000, "UTF-8"), "windows.txt": ("hello".encode("utf-16"), "UTF-16"),
           "sixteen.txt": ("hello".encode("utf-16-le"), "zero bytes"), "empty.txt": (b"", "empty"),
           "only_bom.txt": (b"\xef\xbb\xbf", "empty"), "surrogate.txt": (b"\xed\xa0\x80", "UTF-8")}
    for name, (content, _) in bad.items():
        (texts / name).write_bytes(content)
    files, skipped, _ = find_texts([texts])
    assert len(files) == 40 and {Path(s["file"]).name for s in skipped} == set(bad)
    for entry in skipped:
        assert bad[Path(entry["file"]).name][1] in entry["reason"]


def test_names_that_are_no_utf8(texts, tmp_path, capsys):
    for name, content in ((b"caf\xe9.txt", b"good"), (b"\xff.txt", b"\xff")):
        with open(os.path.join(os.fsencode(texts), name), "wb") as stream:
            stream.write(content)
    manifest = prepare([texts], tmp_path / "out", encoding="bytes")
    assert "\ufffd.txt (not valid UTF-8)" in capsys.readouterr().out and manifest["sources"][0]["files"] == 41


def as_nobody(code: str, *arguments) -> subprocess.CompletedProcess:
    """Run code as a user without rights, after the imports: root may read everything."""
    start = ("import codecs, mmap, os, sys, tiktoken, prepare, token_data, runtime\ncodecs.lookup('utf-8-sig')\n"
             "if os.geteuid() == 0: os.seteuid(65534)\n")
    return subprocess.run([sys.executable, "-c", start + code, *map(str, arguments)], cwd=SCRIPT.parent, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT / "py")})


@pytest.fixture
def open_folder(texts):
    """texts in a folder that a user without rights can reach and write into"""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        yield shutil.copytree(texts, Path(place) / "texts")


def test_files_without_permission(open_folder):
    secret, listed = open_folder / "part0" / "00.txt", open_folder / "part1"
    secret.chmod(0)         # cannot be opened
    listed.chmod(0o744)     # can be listed, its files cannot be reached
    (open_folder / "part2").chmod(0)        # cannot be listed
    call = "sys.exit(prepare.main(sys.argv[1:]))"
    options = ["--out", open_folder.parent / "out", "--encoding", "bytes", "--val-fraction", "0.2"]
    try:
        done = as_nobody(call, open_folder, *options)
        assert done.returncode == 0, done.stderr
        skipped = read_manifest(open_folder.parent / "out")["skipped"]
        assert len(skipped) == 1 + 13 + 1 and all("Permission denied" in entry["reason"] for entry in skipped)
        for named in (secret, listed / "01.txt", open_folder / "part2"):
            done = as_nobody(call, named, *options)
            assert done.returncode == 2
            assert_one_sentence(done.stderr[:-1], str(named), "read")
        for out, word in ((open_folder / "part2" / "out", "Permission denied"), (open_folder / "new", "be written"),
                          (open_folder / "part2", "cannot be used")):
            done = as_nobody(call, open_folder, *options, "--out", out)
            assert done.returncode == 2
            assert_one_sentence(done.stderr[:-1], word, str(out))
        (open_folder.parent / "out" / "train_00000.bin").chmod(0)
        call = "try: token_data.open_shards(sys.argv[1], T=8)\nexcept runtime.UserError as error: print(error)"
        done = as_nobody(call, open_folder.parent / "out")
        assert_one_sentence(done.stdout[:-1], "train_00000.bin cannot be read (Permission denied)")
    finally:
        for folder in (listed, open_folder / "part2"):
            folder.chmod(0o755)


def test_text_arrives_as_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n\n \xe4\xb8\xad")
    files, _, _ = find_texts([path])
    assert list(split_by_text(files, 0.5)) == ["one\r\ntwo\rthree\n\n 中"]


def test_long_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    path, text = tmp_path / "long.txt", lorem(1, 500_000)
    path.write_text(text)
    documents = list(read_documents(find_texts([path])[0][0], 0.05))
    assert "".join(document.text for document in documents) == text
    assert len(documents) > 25 and all(document.text.endswith("\n") for document in documents[:-1])
    assert [document.split for document in documents].count("val") in (1, 2)


def test_one_endless_line_is_cut_all_the_same(tmp_path):
    path = tmp_path / "line.txt"
    path.write_text("中" * 300_000)
    documents = list(read_documents(find_texts([path])[0][0], 0.05))
    assert sum(len(document.text) for document in documents) == 300_000
    assert max(len(document.text) for document in documents) <= 2 * text_documents.PIECE


@pytest.mark.parametrize("val_fraction", [0.01, 0.05, 0.3, 0.9])
def test_held_out_share_is_right_and_pieces_are_spread(val_fraction):
    single = [is_held_out(start / 10_000, 0, val_fraction) for start in range(10_000)]
    assert abs(sum(single) / 10_000 - val_fraction) < 0.001
    for start in (0.0, 0.3, 0.999):
        held_out = [is_held_out(start, number, val_fraction) for number in range(1000)]
        for first in range(0, 900, 100):
            assert abs(sum(held_out[first:first + 100]) - 100 * val_fraction) <= 1.01


def test_adding_files_moves_no_document(texts):
    (texts / "long.txt").write_text(lorem(77, 400_000))
    before = split_by_text(find_texts([texts])[0], 0.2)
    for number in range(100, 160):
        (texts / f"{number}.txt").write_text(lorem(number, 500))
    (texts / "part0" / "00.txt").rename(texts / "zz.txt")       # moved and copied: the text decides, not the name
    shutil.copy(texts / "part1" / "01.txt", texts / "copy.txt")
    after = split_by_text(find_texts([texts])[0], 0.2)
    assert {text: after[text] for text in before} == before and set(before.values()) == {"train", "val"}
    more = split_by_text(find_texts([texts])[0], 0.3)
    assert all(more[text] == "val" for text, split in after.items() if split == "val" and len(text) <= 2000)


def test_limit_takes_a_spread_and_holds(texts):
    files, _, _ = find_texts([texts], max_bytes=20_000)
    assert 20_000 <= sum(file.bytes for file in files) < 24_000
    assert {file.name[:5] for file in files} == {"part0", "part1", "part2"}
    assert files == find_texts([texts], max_bytes=20_000)[0]


def test_limit_within_one_file(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(lorem(1, 3_000_000) + "\n", encoding="utf-8")
    with open(path, "ab") as stream:
        stream.write(b"\xff" * 10)       # beyond the limit: never looked at
    manifest = prepare(path, tmp_path / "out", encoding="bytes", max_bytes=500_000)
    taken = sum(split["bytes"] for split in manifest["splits"].values())
    assert 500_000 <= taken < 500_000 + LONG_FILE


def test_stdlib_is_pythons_own_source_without_tests_and_packages():
    files, _, _ = find_texts(["stdlib"])
    names = {file.name for file in files}
    assert {"os.py", "json/decoder.py"} <= names and all(name.endswith(".py") for name in names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in names)
    assert sum(file.bytes for file in files) > 5_000_000


def test_file_that_changes_while_it_is_read(texts):
    file = find_texts([texts])[0][0]
    file.path.write_bytes(b"\xff")
    with pytest.raises(UserError) as error:
        list(read_documents(file, 0.1))
    assert_one_sentence(error.value, str(file.path), "changed")


# ---- the whole way ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("encoding", ["bytes", "gpt2"])
def test_shards_hold_exactly_the_documents(texts, tmp_path, encoding):
    (texts / "special.txt").write_text("what is <|endoftext|>? " * 20)
    out = tmp_path / "out"
    manifest = prepare([texts], out, encoding=encoding, val_fraction=0.2, shard_tokens=10_000)
    verify_hashes(out)
    assert manifest == read_manifest(out) and sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts"]
    encoder, splits = get_encoding(encoding), split_by_text(find_texts([texts])[0], 0.2)
    for split in ("train", "val"):
        expected = [text for text, side in splits.items() if side == split]
        ids = tokens_of(out, split)
        assert ids == [i for text in expected for i in encoder.encode_ordinary(text) + [encoder.eot_token]]
        entry = manifest["splits"][split]
        assert entry["documents"] == len(expected) == ids.count(encoder.eot_token) and entry["tokens"] == len(ids)
        assert entry["bytes"] == sum(len(text.encode()) for text in expected)
        assert all(shard["tokens"] == 10_000 for shard in entry["shards"][:-1])
    assert len(manifest["splits"]["train"]["shards"]) > 3 and manifest["special_looking_documents"] == 1
    size = sum(path.stat().st_size for path in texts.rglob("*.txt"))
    assert manifest["sources"] == [{"source": str(texts), "files": 41, "bytes": size}]
    shards = open_shards(out, T=64)
    assert shards.encoding == encoding and shards.bytes_per_token("train") == pytest.approx(
        manifest["splits"]["train"]["bytes"] / manifest["splits"]["train"]["tokens"])


def test_byte_models_agree_with_counting_by_hand(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BATCH_CHARACTERS", 5000)       # several batches
    manifest = prepare([texts], tmp_path / "out", encoding="bytes", val_fraction=0.2)
    train, val = ([256, *tokens_of(tmp_path / "out", split)] for split in ("train", "val"))
    single, pair, before = ({}, {}, {})
    for a, b in zip(train, train[1:]):
        single[b], pair[a, b], before[a] = single.get(b, 0) + 1, pair.get((a, b), 0) + 1, before.get(a, 0) + 1
    unigram = sum(-math.log((single.get(b, 0) + 1) / (len(train) - 1 + 257)) for b in val[1:])
    bigram = sum(-math.log((pair.get((a, b), 0) + 1) / (before.get(a, 0) + 257)) for a, b in zip(val, val[1:]))
    val_bytes = manifest["splits"]["val"]["bytes"]
    assert manifest["reference"]["unigram_nats_per_byte"] == pytest.approx(unigram / val_bytes)
    assert manifest["reference"]["bigram_nats_per_byte"] == pytest.approx(bigram / val_bytes)


def test_yardstick_does_not_depend_on_the_encoding_and_orders_as_it_should(tmp_path):
    manifests = [prepare("stdlib", tmp_path / name, encoding=name, max_bytes=1_500_000) for name in ("bytes", "gpt2")]
    assert manifests[0]["reference"] == manifests[1]["reference"]
    reference = manifests[0]["reference"]
    assert 1.5 < reference["bigram_nats_per_byte"] < reference["unigram_nats_per_byte"] < math.log(257)


def test_the_same_request_is_answered_at_once(texts, tmp_path, capsys):
    out = tmp_path / "out"
    first = prepare([texts], out, encoding="bytes")
    before = contents(out)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    shutil.copytree(texts, tmp_path / "elsewhere")      # the same text at another place is the same request
    for same in (texts, tmp_path / "elsewhere"):
        assert prepare([same], out, encoding="bytes") == first
        assert "already prepared" in capsys.readouterr().out
    assert contents(out) == before and times == {path: path.stat().st_mtime_ns for path in out.iterdir()}


def test_command_line_summary_progress_and_flat_folder(texts, tmp_path):
    """The modules side by side, as a notebook writes them, run from there without py/ or data_prep/."""
    flat = tmp_path / "flat"
    flat.mkdir()
    ours = [ROOT / "py" / f"{name}.py" for name in ("runtime", "token_data", "foreign_shards")]
    for path in [*ours, *SCRIPT.parent.glob("*.py")]:
        shutil.copy(path, flat)
    (texts / "bad.txt").write_bytes(b"\xff")
    (texts / "special.txt").write_text("<|endoftext|>")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = ["--out", tmp_path / "out", "--encoding", "bytes", "--val-fraction", "0.2"]
    command = [sys.executable, "prepare.py", texts, *options]
    done = subprocess.run(command, cwd=flat, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    for words in ("train ", "val ", "bigram", "skipped 1 files", "bad.txt (not valid UTF-8)", "1 documents contain"):
        assert words in done.stdout, done.stdout
    verify_hashes(tmp_path / "out")


def test_progress_says_rate_and_time_left(monkeypatch, capsys):
    clock = iter([100.0, 102.0, 104.0, 106.0, 108.0])
    monkeypatch.setattr(preparation.time, "monotonic", lambda: next(clock))
    progress = preparation.Progress("prepared")
    for done in (10, 20, 30, 40):
        progress.say(done * 1_000_000, 640_000_000)
    assert capsys.readouterr().out == (
        "prepared [--------------------] 3% 20 of 640 MB, 5.0 MB/s, 2 min 4 s left\n"
        "prepared [#-------------------] 6% 40 of 640 MB, 5.0 MB/s, 2 min 0 s left\n")


# ---- refusals --------------------------------------------------------------------------------------------------------

def write(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


REFUSALS = {     # name: (arguments after the sources are made in folder f, words)
    "missing file": (lambda f: [f / "none.txt"], ["none.txt", "no file or folder"]),
    "missing beside a good one": (lambda f: [write(f / "a.txt", b"x" * 500), f / "none.txt"], ["none.txt"]),
    "unreadable": (lambda f: ["/proc/self/mem"], ["/proc/self/mem cannot be read"]),
    "device": (lambda f: ["/dev/zero"], ["neither a file nor a folder"]),
    "no text in folder": (lambda f: [write(f / "t" / "a.png").parent], ["holds no text files", ".txt"]),
    "empty folder": (lambda f: [(f / "t").mkdir() or f / "t"], ["holds no text files"]),
    "empty file": (lambda f: [write(f / "a.txt")], ["a.txt: empty"]),
    "only bad files": (lambda f: [write(f / "t" / "a.txt", b"\xff").parent], ["a.txt: not valid UTF-8"]),
    "twenty words": (lambda f: [write(f / "a.txt", b"word " * 20)], ["single document", "64 KiB"]),
    "none held out": (lambda f: [write(f / "a.txt", b"x"), write(f / "b.txt", b"y"), "--val-fraction", "0.001"],
                      ["None of 2 documents", "val_fraction=0."]),
    "all held out": (lambda f: [write(f / "a.txt", b"x"), write(f / "b.txt", b"y"), "--val-fraction", "0.999"],
                     ["All 2 documents", "below 0.999"]),
    "fraction 0": (lambda f: [write(f / "a.txt", b"x"), "--val-fraction", "0"], ["val_fraction=0.0"]),
    "fraction 1": (lambda f: [write(f / "a.txt", b"x"), "--val-fraction", "1"], ["val_fraction=1.0"]),
    "fraction nan": (lambda f: [write(f / "a.txt", b"x"), "--val-fraction", "nan"], ["val_fraction=nan"]),
    "limit 0": (lambda f: [write(f / "a.txt", b"x"), "--max-bytes", "0"], ["max_bytes=0"]),
    "shards of 0": (lambda f: [write(f / "a.txt", b"x"), "--shard-tokens", "0"], ["shard_tokens=0"]),
    "encoding": (lambda f: [write(f / "a.txt", b"x"), "--encoding", "gpt3"], ["'gpt3'"]),
    "out is a file": (lambda f: [write(f / "a.txt", b"x"), "--out", write(f / "o")], ["is a file, not a folder"]),
    "out below a file": (lambda f: [write(f / "a.txt", b"x"), "--out", write(f / "o") / "out"], ["Not a directory"]),
    "out below /proc": (lambda f: [write(f / "a.txt", b"x"), "--out", "/proc/none/out"], ["/proc has 0 MB free"]),
    "other files in out": (lambda f: [write(f / "a.txt", b"x"), "--out", write(f / "o" / "b").parent], ["other files"]),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_one_line_exit_status_2_and_nothing_written(tmp_path, case, capsys):
    make, words = REFUSALS[case]
    arguments = [str(argument) for argument in make(tmp_path)]
    before = contents(tmp_path)
    assert main(["--out", str(tmp_path / "out"), "--encoding", "bytes", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert_one_sentence(printed.err[:-1], *words)
    assert contents(tmp_path) == before


def test_refusal_as_the_shell_sees_it(tmp_path):
    done = run(tmp_path / "none", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [[100, 200], [100_000], [70_000, 10, 20, 30]])
def test_the_share_that_a_refusal_names_is_enough(tmp_path, sizes):
    paths = [write(tmp_path / f"{size}.txt", lorem(size, size).encode()) for size in sizes]
    with pytest.raises(UserError) as error:
        prepare(paths, tmp_path / "out", encoding="bytes", val_fraction=0.0001)
    assert_one_sentence(error.value, "None of ")
    named = float(str(error.value).split("val_fraction=")[1].split()[0])
    splits = prepare(paths, tmp_path / "out", encoding="bytes", val_fraction=named)["splits"]
    assert splits["val"]["documents"] == 1 and splits["train"]["documents"] >= 1


def test_the_share_that_a_refusal_names_is_enough_within_a_limit(tmp_path):
    path = write(tmp_path / "long.txt", lorem(3, 1_500_000).encode() + b"\xff" * 10)
    with pytest.raises(UserError) as error:
        prepare(path, tmp_path / "out", encoding="bytes", val_fraction=0.0001, max_bytes=90_000)
    named = float(str(error.value).split("val_fraction=")[1].split()[0])
    splits = prepare(path, tmp_path / "out", encoding="bytes", val_fraction=named, max_bytes=90_000)["splits"]
    assert splits["val"]["documents"] == 1


def test_nothing_named(tmp_path):
    with pytest.raises(UserError) as error:
        prepare([], tmp_path / "out")
    assert_one_sentence(error.value, "stdlib")


@pytest.mark.parametrize("other, word", [(dict(encoding="gpt2"), "encoding"), (dict(val_fraction=0.3), "val_fraction"),
                                         (dict(max_bytes=30_000), "max_bytes"), (dict(sources="more"), "text")])
def test_finished_shards_of_another_request_are_kept(texts, tmp_path, other, word):
    out = tmp_path / "out"
    prepare([texts], out, encoding="bytes", val_fraction=0.2)
    before = contents(out)
    if other.pop("sources", None):
        (texts / "part0" / "00.txt").write_text(lorem(99, 2000))        # the same size, another text
    with pytest.raises(UserError) as error:
        prepare([texts], out, **{"encoding": "bytes", "val_fraction": 0.2, **other})
    assert_one_sentence(error.value, str(out), "already holds", word, "delete")
    assert contents(out) == before


def test_damaged_shards_are_not_called_prepared(texts, tmp_path):
    out = tmp_path / "out"
    prepare([texts], out, encoding="bytes")
    os.truncate(out / "train_00000.bin", 1000)
    with pytest.raises(UserError) as error:
        prepare([texts], out, encoding="bytes")
    assert_one_sentence(error.value, "train_00000.bin", "1,000 bytes")


# ---- disk ------------------------------------------------------------------------------------------------------------

WIDTHS = [(65_536, "<u2", [0, 65_535]), (65_537, "<u4", [65_536]), (100_277, "<u4", [70_000])]


@pytest.mark.parametrize("vocab_size, dtype, ids", WIDTHS)
def test_width_follows_the_vocabulary(tmp_path, vocab_size, dtype, ids):
    writer = SplitWriter(tmp_path, "train", vocab_size)
    writer.add(np.array(ids, dtype=np.uint32), text_bytes=1, documents=1)
    shard, = writer.finish()["shards"]
    assert np.fromfile(tmp_path / shard["file"], dtype).tolist() == ids and shard["max_id"] == max(ids)


@pytest.mark.parametrize("ids", [[70_000, 65_536, 1], [257], [-1, 3]])
def test_ids_outside_the_vocabulary_are_never_wrapped(tmp_path, ids):
    writer = SplitWriter(tmp_path, "train", vocab_size=257)
    with pytest.raises(UserError) as error:
        writer.add(np.array(ids), text_bytes=1, documents=1)
    assert_one_sentence(error.value, "0..256", "another encoding")
    assert not list(tmp_path.iterdir())


def test_disk_is_checked_before(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: types.SimpleNamespace(free=1_000_000))
    with pytest.raises(UserError) as error:
        prepare([texts], tmp_path / "new" / "out", encoding="bytes")
    assert_one_sentence(error.value, "1 MB free", "max_bytes")
    assert not (tmp_path / "new").exists()


def test_disk_that_fills_up_all_the_same(texts, tmp_path):
    """A limit on the size of files makes the system refuse to write on, as a full disk does."""
    command = f"ulimit -f 40; exec {sys.executable} {SCRIPT} {texts} --out {tmp_path / 'out'} --encoding bytes"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert_one_sentence(done.stderr.strip(), "could not be written", "make room")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.fixture
def large_text(tmp_path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    text = lorem(5, 300_000)
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"{number}\n" + text)
    return folder


def start(sources, out, *arguments) -> subprocess.Popen:
    options = ["--out", out, "--encoding", "bytes", "--shard-tokens", "200000", *arguments]
    command = [sys.executable, SCRIPT, sources, *options]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_preparation_never_looks_finished(large_text, tmp_path):
    out, seen = tmp_path / "out", set()
    for delay in (0.0, *np.random.default_rng().uniform(0, 0.5, 4)):      # the first comes in time on any machine
        process = start(large_text, out)
        while process.poll() is None and not list(tmp_path.glob(".out.*.partial")):      # until it writes
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        process.communicate()
        left = list(tmp_path.glob(".out.*"))
        assert len(left) <= 1       # each start removes what the last one left
        if out.exists():
            verify_hashes(out)
            shutil.rmtree(out)
            seen.add("finished")
        elif left:
            seen.add("killed")
    assert "killed" in seen
    assert start(large_text, out).wait() == 0
    verify_hashes(out)
    assert not list(tmp_path.glob(".out.*")) and len(read_manifest(out)["splits"]["train"]["shards"]) > 20


def test_interrupted_preparation_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), unfinished_folder(tmp_path / "out") as folder:
        (folder / "train_00000.bin").write_bytes(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_two_at_once_do_not_mix(large_text, texts, tmp_path):
    out = tmp_path / "out"
    processes = [start(large_text, out), start(texts, out), start(large_text, out)]
    answers = [(process.communicate()[1], process.returncode) for process in processes]
    assert 0 in [code for _, code in answers] and {code for _, code in answers} <= {0, 2}
    for message, code in answers:
        assert code == 0 or "already holds" in message or "another preparation" in message, message
    verify_hashes(out)
    assert not list(tmp_path.glob(".out.*"))
    winner = large_text if read_manifest(out)["splits"]["train"]["documents"] > 100 else texts
    prepare([winner], out, encoding="bytes", shard_tokens=200_000)       # already prepared: all of it is the winner's


def test_the_second_to_finish_says_so(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError) as error, unfinished_folder(out) as mine:
        (mine / "a").write_text("mine")
        with unfinished_folder(out) as other:        # does not take mine for abandoned
            (other / "a").write_text("theirs")
    assert_one_sentence(error.value, "another preparation")
    assert (out / "a").read_text() == "theirs" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_target_may_be_an_empty_folder_or_a_link_to_one(texts, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    prepare([texts], tmp_path / "out", encoding="bytes")
    verify_hashes(tmp_path / "disk")
    assert oct((tmp_path / "disk").stat().st_mode)[-3:] == oct(texts.stat().st_mode)[-3:]
    assert already_prepared(tmp_path / "nothing", {}) is None


def test_disk_without_locks(texts, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(95, "Operation not supported")
    monkeypatch.setattr(shard_writer.fcntl, "flock", no_locks)
    abandoned = tmp_path / ".out.12345678.partial"
    abandoned.mkdir()
    prepare([texts], tmp_path / "out", encoding="bytes")
    assert abandoned.exists()       # nobody can tell whether it is


def test_no_torch_and_quick_imports():
    code = "import sys, prepare; print([name for name in ('torch', 'tiktoken', 'torch_xla') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=SCRIPT.parent, text=True).strip() == "[]"


def test_modules_fit_into_a_notebook_cell():
    for path in [*SCRIPT.parent.glob("*.py"), ROOT / "py" / "token_data.py"]:
        assert not [line for line in path.read_text().splitlines() if line.startswith("# %%") or len(line) > 120], path
