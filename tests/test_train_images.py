"""The image classifier: its data read safely, each test image counted once, one model on all ranks, one program."""
import io
import json
import pickle
import re
import tarfile

import numpy as np
import pytest
import torch
from conftest import ROOT, run_script
from safetensors.torch import load_file

import classification
import image_data
import train_images
from runtime import Platform, UserError

SMALL = dict(preset="small", data="digits", width=8, epochs=1, batch=96, log_every=5, eval_every=1)


# ---- CIFAR-10's archive ----------------------------------------------------------------------------------------------

class PickleOfPython2(pickle._Pickler):
    """Writes as the archive's author did: byte strings as Python 2's `str`, NumPy under its name of that time."""
    dispatch = pickle._Pickler.dispatch.copy()

    def save_bytes(self, value):
        self.write(b"T" + len(value).to_bytes(4, "little") + value)
        self.memoize(value)
    dispatch[bytes] = save_bytes

    def save_str(self, value):
        self.save_bytes(value.encode())
    dispatch[str] = save_str

    def save_global(self, thing, name=None):
        self.write(f"c{thing.__module__.replace('numpy._core', 'numpy.core')}\n{thing.__name__}\n".encode())
        self.memoize(thing)
    dispatch[type(len)] = dispatch[type] = dispatch[type(image_data.load_digits)] = save_global


def python2_pickle(value) -> bytes:
    file = io.BytesIO()
    PickleOfPython2(file, 2).dump(value)
    return file.getvalue()


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """An archive in the official form: digits, three times as large and coloured, as rows of 3 x 32 x 32 bytes."""
    train, test = image_data.load_digits()
    folder = tmp_path_factory.mktemp("cifar")

    def rows(part, first, last):
        images = np.zeros((last - first, 3, 32, 32), dtype=np.uint8)
        for channel, brightness in enumerate((1.0, 0.5, 0.25)):
            images[:, channel, 4:28, 4:28] = (part.images[first:last, 0] * brightness).repeat(3, 1).repeat(3, 2)
        return {b"batch_label": b"a part", b"data": images.reshape(-1, 3072),
                b"labels": [int(label) for label in part.labels[first:last]]}

    files = {f"data_batch_{n + 1}": rows(train, n * 100, n * 100 + 100) for n in range(5)}
    files |= {"test_batch": rows(test, 0, 101),
              "batches.meta": {b"label_names": [f"class{n}".encode() for n in range(10)], b"num_vis": 3072}}
    (folder / image_data.FOLDER).mkdir()
    for name, content in files.items():
        (folder / image_data.FOLDER / name).write_bytes(python2_pickle(content))
    with tarfile.open(folder / image_data.ARCHIVE, "w:gz") as archive:
        archive.add(folder / image_data.FOLDER, image_data.FOLDER)
    return folder


def test_the_archive_and_its_folder_hold_the_same_images(cifar):
    for train, test in (image_data.load(str(cifar / image_data.ARCHIVE)), image_data.load(str(cifar / image_data.FOLDER)),
                        image_data.load("auto", str(cifar))):
        assert train.images.shape == (500, 3, 32, 32) and test.images.shape == (101, 3, 32, 32)
        assert train.names[3] == "class3" and train.source == "CIFAR-10" and train.mirrors
        digits, _ = image_data.load("digits")
        assert (train.labels == digits.labels[:500]).all()
        assert (train.images[:, 0, 4:28:3, 4:28:3] == digits.images[:500, 0]).all(), "red comes first, then row by row"
        assert (train.images[:, 2] == train.images[:, 0] // 4).all()


def test_without_an_archive_the_digits_take_its_place_and_say_so(tmp_path, capsys):
    train, test = image_data.load("auto", str(tmp_path))
    assert (len(train), len(test), train.mirrors) == (1438, 359, False) and train.images.max() == 255
    assert "no CIFAR-10 among the inputs" in capsys.readouterr().out


def damaged(cifar, folder, name: str):
    """A copy of the archive's folder, or of the archive, with one thing wrong."""
    copy = folder / "copy"
    copy.mkdir()
    for file in (cifar / image_data.FOLDER).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    if name == "a file is missing":
        (copy / "data_batch_4").unlink()
    elif name == "code in a pickle":
        (copy / "data_batch_2").write_bytes(b"cos\nsystem\n(S'touch was_run'\ntR.")
    elif name == "other shapes":
        (copy / "test_batch").write_bytes(python2_pickle({b"data": np.zeros((4, 3000), np.uint8), b"labels": [0] * 4}))
    elif name == "a label too large":
        (copy / "test_batch").write_bytes(python2_pickle({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}))
    elif name == "cut-off archive":
        copy = folder / "cut.tar.gz"
        copy.write_bytes((cifar / image_data.ARCHIVE).read_bytes()[:5000])
    elif name == "no archive":
        copy = folder / "notes.txt"
        copy.write_text("not an archive")
    elif name == "nothing":
        copy = folder / "nowhere"
    return copy


@pytest.mark.parametrize("name, reason", [
    ("a file is missing", "is not CIFAR-10's Python version: data_batch_4 not in it"),
    ("code in a pickle", "data_batch_2 cannot be read .it asks for os.system"),
    ("other shapes", "test_batch does not hold rows of 3,072 bytes with a label below 10"),
    ("a label too large", "test_batch does not hold rows"),
    ("cut-off archive", "cannot be read as an archive .*was it cut off"),
    ("no archive", "cannot be read as an archive"), ("nothing", "does not exist: give cifar-10-python.tar.gz")])
def test_what_is_not_cifar_is_refused_in_one_sentence(cifar, tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason) as caught:
        image_data.load(str(damaged(cifar, tmp_path, name)))
    assert "\n" not in str(caught.value) and not (tmp_path / "was_run").exists()


# ---- order, shapes, augmentation -------------------------------------------------------------------------------------

def test_augmentation_moves_images_by_seed_epoch_and_row_alone(cifar):
    train, _ = image_data.load(str(cifar / image_data.ARCHIVE))
    plain, moved = train_images.Images(train), train_images.Images(train, 5)
    moved.set_epoch(3)
    together = moved.__getitems__(list(range(40)))["images"]
    alone = torch.cat([moved.__getitems__([row])["images"] for row in range(40)])
    assert (together == alone).all()
    kinds = set()
    padded = np.pad(train.images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    for row, image in enumerate(together.numpy()):
        found = {(dy, dx, flip) for dy in range(9) for dx in range(9) for flip in (1, -1)
                 if (image[..., ::flip] == padded[row, :, dy:dy + 32, dx:dx + 32]).all()}
        assert found, "it is no shift of the image, mirrored or not"
        kinds |= {found.pop()} if len(found) == 1 else set()
    assert len(kinds) > 20 and {flip for _, _, flip in kinds} == {1, -1}
    moved.set_epoch(4)
    assert (moved.__getitems__(list(range(40)))["images"] != together).any()
    assert (plain.__getitems__([7, 3])["images"].numpy() == train.images[[7, 3]]).all()
    digits = train_images.Images(image_data.load_digits()[0], 5)
    assert not digits.mirrored.any() and digits.shift == 1


LOADERS = """
import sys
import runtime as rt
platform = rt.patch_environment("cpu")
import json, torch
import classification, image_data, train_images

def worker():
    runtime = rt.Runtime()
    train, test = image_data.load("digits")
    train_data, test_data = train_images.Images(train, 3), train_images.Images(test)
    class Numbered:         # labels that say which row came
        def __init__(self, data): self.data, self.set_epoch = data, data.set_epoch
        def __len__(self): return len(self.data)
        def __getitems__(self, rows): return {**self.data.__getitems__(rows), "labels": torch.tensor(rows)}
    batches = classification.train_loader(Numbered(train_data), 96, runtime, seed=11)
    order = []
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        order.append([(batch["labels"].tolist(), int(batch["images"].sum())) for batch in batches])
    evaluation = [(batch["rows"].tolist(), len(batch["images"]))
                  for batch in classification.eval_loader(test_data, 96, runtime)]
    torch.manual_seed(0)
    config = train_images.make_config("small")
    model = train_images.ResNet(config, train.images, 10)
    result = classification.evaluate(model, lambda batch: model(batch["images"]),
                                     classification.eval_loader(test_data, 96, runtime), runtime, len(test_data))
    json.dump(dict(order=order, evaluation=evaluation, predicted=result.predicted.tolist(), losses=result.losses.tolist()),
              open(f"{runtime.world_size}_{runtime.rank}.json", "w"))

for processes in (1, 2, 3):
    rt.launch(worker, (), platform, processes)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What 1, 2 and 3 processes were given: {(processes, rank): ...}."""
    folder = tmp_path_factory.mktemp("loaders")
    run_script(LOADERS, folder)
    return {(n, rank): json.loads((folder / f"{n}_{rank}.json").read_text()) for n in (1, 2, 3) for rank in range(n)}


def test_every_batch_of_training_is_the_same_for_any_number_of_processes(seen):
    def global_batches(processes, epoch):
        ranks = [seen[processes, rank]["order"][epoch] for rank in range(processes)]
        assert {len(rows) for batches in ranks for rows, _ in batches} == {96 // processes}
        return [(sum((rows for rows, _ in parts), []), sum(pixels for _, pixels in parts)) for parts in zip(*ranks)]

    for epoch in range(3):
        alone = global_batches(1, epoch)
        assert alone == global_batches(2, epoch) == global_batches(3, epoch), "rows or augmentation differ"
        rows = sum((rows for rows, _ in alone), [])
        assert len(rows) == len(set(rows)) == 1438 // 96 * 96
    first, second, again = (global_batches(1, epoch) for epoch in range(3))
    assert first == again != second


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_test_image_counts_once_though_359_divide_by_nothing(seen, processes):
    ranks = [seen[processes, rank] for rank in range(processes)]
    assert len({len(rank["evaluation"]) for rank in ranks}) == 1, "a rank would wait for another"
    assert {size for rank in ranks for _, size in rank["evaluation"]} == {96 // processes}
    rows = [row for rank in ranks for rows, _ in rank["evaluation"] for row in rows]
    assert sorted(row for row in rows if row >= 0) == list(range(359)) and rows.count(-1) == 384 - 359
    for rank in ranks:
        assert rank["predicted"] == seen[1, 0]["predicted"]
        assert rank["losses"] == pytest.approx(seen[1, 0]["losses"], rel=1e-4)


def test_an_image_counted_twice_or_never_is_no_accuracy():
    with pytest.raises(RuntimeError, match="did not see 2 of 4 examples exactly once"):
        classification.check_each_seen_once(np.array([1.0, 2.0, 0.0, 1.0]))


# ---- training --------------------------------------------------------------------------------------------------------

def train(folder, platform: str, processes: int = 0, **settings):
    """Train in a fresh Python; returns what was printed and the records of the log."""
    code = f"""
    import runtime as rt
    platform = rt.patch_environment({platform!r})
    import train_images
    train_images.launch(train_images.make_config(**{dict(SMALL, processes=processes, **settings)!r}), platform)
    """
    done = run_script(code, folder, VIRTUAL_TPU_DEVICES="8")
    return done.stdout, [json.loads(line) for line in (folder / "runs/images/log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    output, log = train(folder, "cpu", processes=2, width=16, epochs=5, eval_every=5)
    return folder / "runs/images", output, log


def test_two_processes_learn_the_digits_and_the_pictures_say_what_the_figures_say(learned):
    folder, output, log = learned
    _, test = image_data.load("digits")
    saved = np.load(folder / train_images.PREDICTIONS)
    right = int((saved["predicted"] == test.labels).sum())
    assert right / 359 > 0.9 and log[-1]["accuracy"] == right / 359 and f"{right} of 359 images" in output
    assert log[-1]["val_loss"] == pytest.approx(saved["losses"].mean(), rel=1e-5)
    matrix = classification.confusion_matrix(test.labels, saved["predicted"], 10)
    assert matrix.sum() == 359 and np.trace(matrix) == right and (matrix.sum(1) == np.bincount(test.labels)).all()
    for name in ("curve.png", "confusion.png", "mistakes.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_saved_model_predicts_what_the_run_predicted(learned):
    folder, _, _ = learned
    train_set, test = image_data.load("digits")
    config = train_images.ImageConfig(**json.loads((folder / "config.json").read_text()))
    model = train_images.ResNet(config, train_set.images, 10).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with torch.no_grad():
        predicted = model(torch.from_numpy(test.images)).argmax(1).numpy()
    assert (predicted == np.load(folder / train_images.PREDICTIONS)["predicted"]).all()


STATISTICS = """
import runtime as rt
platform = rt.patch_environment("cpu")
import torch, train_images, image_data

def worker(shared):
    runtime = rt.Runtime()
    train, _ = image_data.load("digits")
    torch.manual_seed(1)
    model = train_images.ResNet(train_images.make_config("small"), train.images, 10)
    model(torch.from_numpy(train.images[runtime.rank * 50:][:50]))
    before = {name: value.clone() for name, value in model.named_buffers()}
    if shared:
        train_images.share_statistics(model, runtime)
        for name, value in model.named_buffers():
            assert torch.allclose(value.float(), runtime.all_reduce(before[name].float()), atol=1e-6), name
    runtime.check_replicas(model.state_dict(), "now")

rt.launch(worker, (True,), platform, 2)
rt.launch(worker, (False,), platform, 2)
"""


def test_all_ranks_evaluate_with_the_mean_of_their_batch_norm_statistics(tmp_path):
    done = run_script(STATISTICS, tmp_path, check=False)
    assert "now: the replicas hold different weights in 12 of" in done.stdout and "AssertionError" not in done.stdout


def test_eight_virtual_devices_train_one_program_and_evaluate_another(tmp_path):
    output, log = train(tmp_path, "virtual-tpu", epochs=2)
    assert "REHEARSAL on 8" in output and "convolutions bf16" in output and "RECOMPILED" not in output
    assert len({record["compiles"] for record in log if record["step"] < 14}) == 1, "compiled after the first step"
    assert len({record["compiles"] for record in log if record["step"] >= 14}) == 1, "compiled after the first evaluation"
    # Before the training: the check of the replicas. Then the step and its log line; the statistics, a batch of the test
    # set, its notes, their sum.
    assert log[0]["compiles"] == 3 and log[-1]["compiles"] == 7
    assert re.search(r"accuracy: [\d.]+%, \d+ of 359 images, each counted once", output)


@pytest.mark.parametrize("settings, reason", [
    (dict(batch=97), r"batch=97 cannot be shared equally by 2 processes: use 96 and 98"),
    (dict(batch=2000), r"batch=2000 is more than the 1,438 training images"),
    (dict(stages=5), r"stages=5 halve the images 4 times, and they have only 8 pixels: use stages=4"),
    (dict(epochs=0), r"epochs=0 must be at least 1"), (dict(epoch=3), r"setting 'epoch' is not known, did you mean 'epochs'"),
    (dict(preset="resnet50"), r"preset='resnet50' is not known, did you mean 'resnet18'"),
    (dict(learning_rate="1e-3"), r"learning_rate='1e-3' must be of type float")])
def test_a_mistake_is_one_sentence_and_nothing_is_written(tmp_path, monkeypatch, settings, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=reason):
        train_images.launch(train_images.make_config(**{**SMALL, "processes": 2, **settings}), Platform("cpu", 1, "test"))
    assert not list(tmp_path.iterdir())


def test_the_notebooks_side_by_side_quotes_the_training_script():
    table = [line.split(" | ") for line in (ROOT / "notebooks/image_classification.py").read_text().splitlines()
             if re.match(r"# \| \d+ \|", line)]
    script = (ROOT / "py/train_images.py").read_text()
    assert len(table) == 10
    for _, number, _, here, _ in table:
        quoted = re.search(r"`([^`]+)`", here)[1]
        assert quoted in script, quoted
        line = next(line for line in script.splitlines() if quoted in line and not line.startswith("def "))
        mark = re.search(r"# (\d+)\. ", line)
        assert mark is None or mark[1] == number, line


def test_preflight_sees_one_program_a_step_and_the_evaluation(tmp_path):
    """The first half of `preflight.py --template images`; the second, the TPU compiler, takes minutes."""
    run_script("""
    import preflight
    from pathlib import Path
    preflight.trace(dict(template="images", chip="v5e-8", names=True, settings=dict(width=8, stages=2, blocks=1)), Path("."))
    """, tmp_path)
    traced = json.loads((tmp_path / "programs.json").read_text())
    assert [program["per_step"] for program in traced["programs"] if program["kind"] == "optimizer step"] == [1]
    assert [program["kind"] for program in traced["programs"]].count("evaluation") == 1
    assert traced["facts"]["micro_batch"] == 128 and traced["facts"]["unit"] == "images"
