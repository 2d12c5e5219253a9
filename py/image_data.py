"""Small labelled images in memory: CIFAR-10 from its official archive, or the digits that ship with scikit-learn.

    train, test = load("auto")                          # CIFAR-10 among the Kaggle inputs, else the digits
    train, test = load("cifar-10-python.tar.gz")        # the archive, or the folder that it unpacks to
"""
import functools
import io
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import UserError

ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
TRAIN_FILES, TEST_FILES, NAMES_FILE = [f"data_batch_{n}" for n in range(1, 6)], ["test_batch"], "batches.meta"
WANTED = (f"give {ARCHIVE} or the folder {FOLDER} that it unpacks to (www.cs.toronto.edu/~kriz/cifar.html),"
          " or data='digits'")


@dataclass(frozen=True)
class ImageSet:
    """Labelled images of one size."""
    images: np.ndarray      # (N, C, H, W) uint8
    labels: np.ndarray      # (N,) int64
    names: tuple            # of the classes
    mirrors: bool           # whether an image means the same when left and right are exchanged
    source: str

    def __len__(self) -> int:
        return len(self.labels)


@functools.cache        # read once, by the process that launches: forked workers share its memory
def load(data: str = "auto", inputs: str = "/kaggle/input") -> tuple[ImageSet, ImageSet]:
    """(training set, test set). data: 'auto', 'digits', or where CIFAR-10 lies. Raises UserError for anything else."""
    if data == "auto":
        data = find_cifar10(inputs) or "digits"
        if data == "digits":
            print(f"no CIFAR-10 among the inputs ({inputs}): scikit-learn's 1,797 handwritten digits take its place")
    return load_digits() if data == "digits" else load_cifar10(Path(data))


def find_cifar10(inputs: str) -> str | None:
    """The archive, or the folder of its files, somewhere below `inputs`."""
    root = Path(inputs)
    found = sorted(root.rglob(ARCHIVE)) + sorted(p.parent for p in root.rglob(TEST_FILES[0])) if root.is_dir() else []
    return str(found[0]) if found else None


def load_digits() -> tuple[ImageSet, ImageSet]:
    """1,797 digits of 8 x 8 pixels; every fifth is for the test."""
    try:
        from sklearn.datasets import load_digits as read
    except ImportError:
        raise UserError("data='digits' needs scikit-learn, which is not installed: pip install scikit-learn, or"
                        f" give {ARCHIVE}.") from None
    digits = read()
    images = np.round(digits.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    is_test = np.arange(len(labels)) % 5 == 4
    return tuple(ImageSet(images[part], labels[part], tuple("0123456789"), False, "scikit-learn's digits")
                 for part in (~is_test, is_test))


# ---- CIFAR-10 --------------------------------------------------------------------------------------------------------

def load_cifar10(path: Path) -> tuple[ImageSet, ImageSet]:
    """CIFAR-10 from the archive or its folder. Raises UserError with the reason when it is not the official one."""
    files = read_files(path)
    missing = [name for name in (*TRAIN_FILES, *TEST_FILES, NAMES_FILE) if name not in files]
    if missing:
        raise UserError(f"{path} is not CIFAR-10's Python version: {', '.join(missing)} not in it; {WANTED}.")
    names = read_pickle(path, NAMES_FILE, files).get(b"label_names")
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise UserError(f"{path}: {NAMES_FILE} has no list of class names; {WANTED}.")
    names = tuple(name.decode() for name in names)
    return tuple(join([read_batch(path, name, files, len(names)) for name in part], names)
                 for part in (TRAIN_FILES, TEST_FILES))


def read_files(path: Path) -> dict:
    """{file name: bytes}. Nothing is unpacked to the disk."""
    wanted = {*TRAIN_FILES, *TEST_FILES, NAMES_FILE}
    if path.is_dir():
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.name in wanted}
    if not path.is_file():
        raise UserError(f"data={str(path)!r} does not exist: {WANTED}.")
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive.getmembers()
                       if member.isfile() and Path(member.name).name in wanted]
            return {Path(m.name).name: archive.extractfile(m).read() for m in members}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read as an archive ({first_line(error)}): was it cut off on the way?"
                        f" {WANTED}.") from None


class ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and NumPy arrays, and nothing else: a pickle may otherwise run any code."""

    ALLOWED = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
               ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}

    def find_class(self, module, name):
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no image needs")
        return super().find_class(module, name)


def read_pickle(path: Path, name: str, files: dict) -> dict:
    """{bytes: value} of one file, in the form that Python 2 gave it."""
    try:
        content = ArrayUnpickler(io.BytesIO(files[name]), encoding="bytes").load()
    except Exception as error:      # whatever a damaged pickle does
        raise UserError(f"{path}: {name} cannot be read ({first_line(error)}); {WANTED}.") from None
    return content if isinstance(content, dict) else {}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def read_batch(path: Path, name: str, files: dict, classes: int) -> tuple:
    """(n, 3, 32, 32) images and (n,) labels of one file."""
    content = read_pickle(path, name, files)
    images, labels = content.get(b"data"), content.get(b"labels")
    good = (isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2 and images.shape[1] == 3072
            and isinstance(labels, list) and len(labels) == len(images)
            and all(type(label) is int and 0 <= label < classes for label in labels))
    if not good:
        raise UserError(f"{path}: {name} does not hold rows of 3,072 bytes with a label below {classes} each;"
                        f" {WANTED}.")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def join(parts: list, names: tuple) -> ImageSet:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    return ImageSet(images, labels, names, True, "CIFAR-10")
