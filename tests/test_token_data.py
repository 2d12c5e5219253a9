"""token_data.py: refusals in one sentence, windows at their boundaries, an order that visits everything once, batches
that do not depend on the number of processes. The shards here are written by hand, from the format's description."""
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import token_data
from runtime import UserError
from token_data import eval_windows, open_shards, read_manifest, train_batch, verify_hashes, window_order

PY = Path(token_data.__file__).parent


def write_shards(folder: Path, vocab_size=257, dtype="<u2", **splits) -> Path:
    """splits: name=[ids of a shard, ids of a shard, ...]"""
    folder.mkdir(parents=True)
    described = {}
    for name, shards in splits.items():
        entries = []
        for number, ids in enumerate(shards):
            content = np.array(ids).astype(dtype).tobytes()
            (folder / f"{name}_{number:05d}.bin").write_bytes(content)
            entries.append({"file": f"{name}_{number:05d}.bin", "tokens": len(ids), "max_id": int(max(ids, default=-1)),
                            "sha256": hashlib.sha256(content).hexdigest()})
        tokens = sum(map(len, shards))
        described[name] = {"tokens": tokens, "bytes": 3 * tokens, "documents": 1, "shards": entries}
    manifest = {"format": "gpt-token-shards", "version": 1, "dtype": {"<u2": "uint16", "<u4": "uint32"}[dtype],
                "vocab_size": vocab_size, "separator": vocab_size - 1, "encoding": "bytes", "splits": described,
                "reference": {"unigram_nats_per_byte": 3.0, "bigram_nats_per_byte": 2.0}, "sources": [], "skipped": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_shards(tmp_path / "shards", train=[np.arange(100), np.arange(100, 200)], val=[np.arange(50)])


def contents(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(Path(folder).rglob("*"))}


def assert_one_sentence(error, *words):
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and ". " not in text and 40 < len(text) < 400, text
    for word in words:
        assert word in text, text


# ---- refusals --------------------------------------------------------------------------------------------------------

def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def cut(folder, count):
    path = folder / "train_00001.bin"
    path.write_bytes(path.read_bytes()[:count])


def append(folder, content):
    path = folder / "val_00000.bin"
    path.write_bytes(path.read_bytes() + content)


def other_field(*keys, value):
    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = value
    return lambda folder: edit(folder, change)


SHARD = ("splits", "train", "shards", 0)
DAMAGES = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no manifest.json"),
    "half a manifest": (lambda f: (f / "manifest.json").write_text('{"format": "gpt-tok'), "cannot be read"),
    "binary manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "cannot be read"),
    "a list": (lambda f: (f / "manifest.json").write_text("[1]"), "does not describe"),
    "other format": (other_field("format", value="nanogpt"), "does not describe"),
    "next version": (other_field("version", value=2), "version 1"),
    "no splits": (lambda f: edit(f, lambda m: m.pop("splits")), "damaged"),
    "no val": (lambda f: edit(f, lambda m: m["splits"].pop("val")), "damaged"),
    "shards is a number": (other_field("splits", "train", "shards", value=3), "damaged"),
    "tokens is a word": (other_field(*SHARD, "tokens", value="many"), "damaged"),
    "tokens is no whole number": (other_field(*SHARD, "tokens", value=100.0), "damaged"),
    "vocabulary is a word": (other_field("vocab_size", value="257"), "damaged"),
    "tokens without bytes": (other_field("splits", "val", "bytes", value=0), "add up"),
    "no reference": (lambda f: edit(f, lambda m: m.pop("reference")), "damaged"),
    "sum is wrong": (other_field("splits", "train", "tokens", value=1), "add up"),
    "uint16 read as uint32": (other_field("dtype", value="uint32"), "uint32 with 257 ids"),
    "uint16 for a large vocabulary": (other_field("vocab_size", value=100_277), "uint16 with 100277 ids"),
    "unknown dtype": (other_field("dtype", value="float32"), "float32"),
    "separator outside": (other_field("separator", value=257), "separator"),
    "file elsewhere": (other_field(*SHARD, "file", value="../train_00000.bin"), "not the name"),
    "file missing": (lambda f: (f / "train_00001.bin").unlink(), "train_00001.bin is missing"),
    "one byte short": (lambda f: cut(f, 199), "199 bytes where its manifest says 200"),
    "one token short": (lambda f: cut(f, 198), "198 bytes"),
    "empty file": (lambda f: cut(f, 0), "0 bytes"),
    "one byte too long": (lambda f: append(f, b"\0"), "101 bytes where its manifest says 100"),
    "npy header": (lambda f: append(f, b"\0" * 128), "228 bytes"),
    "id not in the model": (other_field(*SHARD, "max_id", value=257), "token id 257 but the model has only 257 ids"),
    "no ids": (other_field(*SHARD, "max_id", value=-1), "token id -1"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_refused_in_one_sentence_and_left_alone(folder, damage):
    change, words = DAMAGES[damage]
    change(folder)
    before = contents(folder)
    with pytest.raises(UserError) as error:
        open_shards(folder, T=8)
    assert_one_sentence(error, words, str(folder))
    assert contents(folder) == before


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError) as error:
        open_shards(tmp_path / "nothing", T=8)
    assert_one_sentence(error, "nothing", "prepare.py")
    assert not list(tmp_path.iterdir())


def test_model_smaller_and_larger_than_the_vocabulary(tmp_path):
    folder = write_shards(tmp_path / "s", vocab_size=50_257, train=[[50_256, 1, 2]], val=[[0, 1, 2]])
    assert open_shards(folder, T=2, vocab_size=50_304).vocab_size == 50_257
    with pytest.raises(UserError) as error:
        open_shards(folder, T=2, vocab_size=257)
    assert_one_sentence(error, "50,256", "257 ids", "at least 50,257", "train_00000.bin")


def test_bad_T(folder):
    with pytest.raises(UserError) as error:
        open_shards(folder, T=0)
    assert_one_sentence(error, "T=0")


@pytest.mark.parametrize("tokens, windows", [(0, 0), (1, 0), (1024, 0), (1025, 1), (2048, 1), (2049, 2)])
def test_split_at_the_boundary_of_a_window(tmp_path, tokens, windows):
    folder = write_shards(tmp_path / "s", train=[np.arange(3000) % 256], val=[np.zeros(tokens, int)] if tokens else [])
    if windows:
        assert open_shards(folder, T=1024).val.windows == windows
        return
    with pytest.raises(UserError) as error:
        open_shards(folder, T=1024)
    assert_one_sentence(error, f"val has {tokens:,} tokens, needs at least 1,025 for T=1024: use a smaller T or more")


def test_shards_each_shorter_than_a_window(tmp_path):
    folder = write_shards(tmp_path / "s", train=[np.arange(8)] * 3, val=[np.arange(9)])
    with pytest.raises(UserError) as error:
        open_shards(folder, T=8)
    assert_one_sentence(error, "train has 24 tokens, needs at least 9 in one shard")


@pytest.mark.parametrize("change", ["one bit", "all zeros", 98, 100])
def test_hashes_find_what_sizes_cannot(folder, change):
    verify_hashes(folder)
    name = "train_00000.bin"
    content = bytearray((folder / name).read_bytes())
    if change == "one bit":
        content[0] ^= 1         # the largest id stays 99
    elif change == "all zeros":
        content[:] = bytes(len(content))
    else:
        other_field(*SHARD, "max_id", value=change)(folder)
    (folder / name).write_bytes(content)
    open_shards(folder, T=8)
    with pytest.raises(UserError) as error:
        verify_hashes(folder)
    assert_one_sentence(error, name, "SHA-256")


def test_long_verification_says_how_far_it_is(folder, monkeypatch, capsys):
    clock = itertools.count(step=6)
    monkeypatch.setattr(token_data.time, "monotonic", lambda: next(clock))
    verify_hashes(folder)
    assert capsys.readouterr().out.count("verifying shards: ") == 3


# ---- windows ---------------------------------------------------------------------------------------------------------

def test_windows_are_shifted_by_one_and_never_cross_a_shard(tmp_path):
    shards = [np.arange(20), np.arange(1000, 1003), np.arange(2000, 2017), np.arange(3000, 3005)]
    folder = write_shards(tmp_path / "s", vocab_size=5000, train=shards, val=[np.arange(5)])
    train = open_shards(folder, T=4).train
    starts = [0, 4, 8, 12] + [2000, 2004, 2008, 2012] + [3000]      # the shard of three tokens has no window
    assert train.windows == len(starts) and train.tokens == 45
    x, y = train.windows_at(range(train.windows))
    assert x.dtype == y.dtype == np.int32 and x.shape == y.shape == (9, 4)
    assert x.tolist() == [list(range(s, s + 4)) for s in starts] and (y == x + 1).all()
    x, _ = train.windows_at(np.array([8, 0, 8, 4]))
    assert x[:, 0].tolist() == [3000, 0, 3000, 2000]


@pytest.mark.parametrize("index", [-1, 24])
def test_window_that_is_not_there(folder, index):
    train = open_shards(folder, T=8).train
    assert train.windows == 24 and train.windows_at([])[0].shape == (0, 8)
    with pytest.raises(IndexError):
        train.windows_at([0, index])


def test_uint32_ids_arrive_whole(tmp_path):
    ids = np.array([70_000, 65_536, 65_535, 100_276])
    folder = write_shards(tmp_path / "s", vocab_size=100_277, dtype="<u4", train=[ids], val=[ids])
    verify_hashes(folder)
    x, y = open_shards(folder, T=3).train.windows_at([0])
    assert x.tolist() == [[70_000, 65_536, 65_535]] and y.tolist() == [[65_536, 65_535, 100_276]]


def test_what_the_manifest_says(folder):
    shards = open_shards(folder, T=8)
    assert (shards.vocab_size, shards.separator, shards.encoding) == (257, 256, "bytes")
    assert shards.bytes_per_token("val") == 3.0 and shards.val.bytes == 150 and shards.val.name == "val"
    assert shards.reference["bigram_nats_per_byte"] == 2.0 and shards.manifest == read_manifest(folder)


def test_shards_are_never_loaded_whole(tmp_path):
    folder = write_shards(tmp_path / "s", train=[[1, 2, 3]], val=[[1, 2, 3]])
    os.truncate(folder / "train_00000.bin", 4_000_000_000)      # sparse: takes no room on the disk
    other_field(*SHARD, "tokens", value=2_000_000_000)(folder)
    other_field("splits", "train", "tokens", value=2_000_000_000)(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train = open_shards(folder, T=2).train
    train_batch(train, 0, 0, 64, slice(None))
    assert train.windows == 999_999_999 and train.windows_at([999_999_998])[0].tolist() == [[0, 0]]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000     # KiB


def test_memory_stays_flat_over_an_epoch(tmp_path):
    """A quarter of a gigabyte is read through the mapping; what it held in memory is given back on the way."""
    folder = write_shards(tmp_path / "s", train=[[1, 2, 3]], val=[[1, 2, 3]])
    os.truncate(folder / "train_00000.bin", 256 * 2 ** 20)      # sparse: takes no room on the disk
    other_field(*SHARD, "tokens", value=2 ** 27)(folder)
    other_field("splits", "train", "tokens", value=2 ** 27)(folder)
    code = f"""if True:
        import resource, token_data
        train = token_data.open_shards({str(folder)!r}, T=2).train
        train = token_data.TokenSplit({str(folder)!r}, "train", token_data.read_manifest({str(folder)!r}), T=8192)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seen = sum(len(token_data.train_batch(train, 0, step, 64, slice(None))[0]) for step in range(256))
        print(seen, train.windows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    done = subprocess.check_output([sys.executable, "-c", code], cwd=PY, text=True)
    seen, windows, grown = map(int, done.split())
    assert seen == 16384 > windows and grown < 120_000       # KiB


# ---- order -----------------------------------------------------------------------------------------------------------

SIZES = [*range(1, 40), 63, 64, 65, 97, 127, 128, 129, 255, 256, 257, 997, 1000, 1023, 1024, 1025, 4096, 65_536, 65_537,
         99_991]


@pytest.mark.parametrize("seed", [0, 1, 1337, -5, 2 ** 63, 10 ** 30])
def test_every_epoch_is_a_permutation(seed):
    for windows in SIZES:
        for epoch in (0, 1, 10 ** 6):
            order = window_order(seed, epoch * windows, windows, windows)
            assert order.dtype == np.int64 and (np.sort(order) == np.arange(windows)).all(), (windows, epoch)


def test_epochs_and_seeds_differ():
    orders = [tuple(window_order(seed, epoch * 50, 50, 50)) for seed in range(20) for epoch in range(20)]
    assert len(set(orders)) == 400


def test_any_position_can_be_asked_for():
    whole = window_order(3, 0, 700, 97)
    for first, count in [(0, 1), (96, 2), (97, 97), (150, 300), (699, 1), (5, 0)]:
        assert (window_order(3, first, count, 97) == whole[first:first + count]).all()
    assert window_order(3, 10 ** 18, 5, 97).shape == (5,)


def test_order_is_uniform():
    """Every window stands at every position equally often, and follows every other equally often (chi-squared / df)."""
    for windows in (5, 17, 64, 100):
        epochs = 40_000 // windows
        order = window_order(11, 0, epochs * windows, windows).reshape(epochs, windows)
        places = np.stack([np.bincount(column, minlength=windows) for column in order.T])
        steps = np.bincount(((order[:, 1:] - order[:, :-1]) % windows).ravel(), minlength=windows)[1:]
        for counts, freedom in ((places, (windows - 1) ** 2), (steps, windows - 2)):
            chi_squared = ((counts - counts.mean()) ** 2 / counts.mean()).sum() / freedom
            assert chi_squared < 1 + 5 * (2 / freedom) ** 0.5, (windows, chi_squared)


def test_all_orders_of_few_windows_happen():
    for windows in (2, 3, 4):
        orders = {tuple(window_order(0, epoch * windows, windows, windows)) for epoch in range(500)}
        assert orders == set(itertools.permutations(range(windows)))


def test_order_never_changes():
    """These numbers hold for ever: a run that is resumed with another order sees some windows twice and some never."""
    assert window_order(1337, 0, 8, 100).tolist() == [84, 10, 97, 38, 64, 72, 92, 6]
    assert window_order(1337, 10 ** 15, 4, 12_345).tolist() == [3601, 6697, 9272, 8469]


# ---- batches ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def train(tmp_path):
    """24 windows of 4 tokens; the first token of window w is 4 w"""
    shards = [np.arange(0, 49), np.arange(48, 97)]
    return open_shards(write_shards(tmp_path / "s", train=shards, val=[np.arange(50)]), T=4).train


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_window_once_an_epoch_whatever_the_number_of_ranks(train, ranks):
    seen, share = [], 8 // ranks
    for step in range(6):       # two epochs of three steps of eight
        parts = [train_batch(train, 7, step, 8, slice(rank * share, (rank + 1) * share))[0] for rank in range(ranks)]
        seen += (np.concatenate(parts)[:, 0] // 4).tolist()
    assert sorted(seen[:24]) == sorted(seen[24:]) == list(range(24))
    assert seen == window_order(7, 0, 48, 24).tolist()


def test_micro_steps_make_up_the_same_batch(train):
    x, y = train_batch(train, 7, 5, 16, slice(None))
    for rows in ([3, 1], np.array([15]), range(4, 8), slice(8, 12)):
        part_x, part_y = train_batch(train, 7, 5, 16, rows)
        chosen = list(range(16))[rows] if isinstance(rows, slice) else list(rows)
        assert (part_x == x[chosen]).all() and (part_y == y[chosen]).all()


def test_a_batch_may_run_over_the_end_of_an_epoch(train):
    seen = np.concatenate([train_batch(train, 1, step, 7, slice(None))[0][:, 0] // 4 for step in range(24)])
    for epoch in seen.reshape(7, 24):
        assert sorted(epoch) == list(range(24))


@pytest.mark.parametrize("first", [0, 1020, 10 ** 15 + 3])
def test_rows_are_those_of_the_order_wherever_they_lie(train, first):
    """The order is computed in blocks of 1024 positions: rows within one, over its end, far away, in any order."""
    step, rows = first // 7, np.array([6, 0, 3, 5])
    seen = np.concatenate([train_batch(train, 5, step + more, 7, rows)[0][:, 0] // 4 for more in range(300)])
    order = window_order(5, step * 7, 300 * 7, 24).reshape(300, 7)
    assert seen.tolist() == order[:, rows].ravel().tolist()


@pytest.mark.parametrize("rows", [[8], [-1], [0, 99]])
def test_row_outside_the_batch(train, rows):
    with pytest.raises(IndexError):
        train_batch(train, 1, 0, 8, rows)


def test_eval_windows_are_fixed_distinct_and_spread(train):
    for count in range(1, 40):
        windows = eval_windows(train, count)
        assert len(windows) == len(set(windows)) == min(count, 24) and 0 <= windows.min() and windows.max() < 24
        assert (windows == eval_windows(train, count)).all()
    assert eval_windows(train, 24).tolist() == list(range(24)) and eval_windows(train, 4).tolist() == [3, 9, 15, 21]
    assert eval_windows(train, 0).tolist() == []


def test_neither_torch_nor_tiktoken_is_imported():
    code = "import sys, token_data; print([name for name in ('torch', 'tiktoken') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=PY, text=True).strip() == "[]"
