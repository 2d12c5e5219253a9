"""Labelled texts: a table of your own, or sentences from the documentation that installed Python packages carry.

    train, test = load("docstrings")                    # which package is this sentence about?
    train, test = load("reviews.csv")                   # columns text and label; csv, tsv or jsonl
    train, test = load("train.csv", "test.csv")
"""
import ast
import csv
import functools
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import UserError

PACKAGES = ("python", "numpy", "matplotlib", "torch")       # on every machine that runs this
SENTENCES = 1000            # of each package: four fifths to train, the rest to test
FOR_TEST = 0.2


@dataclass(frozen=True)
class TextSet:
    """Texts with one label each."""
    texts: tuple
    labels: np.ndarray      # (N,) int64
    names: tuple            # of the classes
    source: str

    def __len__(self) -> int:
        return len(self.texts)


@functools.cache        # read once, by the process that launches: forked workers share its memory
def load(data: str = "docstrings", test_data: str = "") -> tuple[TextSet, TextSet]:
    """(training set, test set). data: 'docstrings' or a table; test_data: a table too, or '' to hold out a fifth.

    Raises UserError for a file that is not such a table.
    """
    rows = docstring_rows() if data == "docstrings" else read_table(Path(data))
    source = "docstrings of installed packages" if data == "docstrings" else Path(data).name
    parts = ([row[:2] for row in rows if not row[2]], [row[:2] for row in rows if row[2]])
    if test_data:
        parts = ([row[:2] for row in rows], [row[:2] for row in read_table(Path(test_data))])
    names = tuple(sorted({row[1] for row in rows}, key=lambda name: (len(name), name)))
    if data == "docstrings":
        names = PACKAGES
    if unknown := {label for _, label in parts[1]} - set(names):
        raise UserError(f"{test_data or data}: the test texts have a label that the training texts lack,"
                        f" {sorted(unknown)[0]!r}: correct it, or leave these texts out.")
    if len(names) < 2 or not all(parts):
        raise UserError(f"{data} has {len(names)} label{'s' * (len(names) != 1)} and {len(parts[0])} training and"
                        f" {len(parts[1])} test texts: at least two labels, and both kinds of text, are needed.")
    return tuple(TextSet(tuple(text for text, _ in part), np.array([names.index(label) for _, label in part], np.int64),
                         names, source) for part in parts)


def share(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: what is held out never moves when texts are added."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2 ** 32


# ---- a table ---------------------------------------------------------------------------------------------------------

def read_table(path: Path) -> list:
    """[(text, label, whether held out for the test)] of a csv, tsv or jsonl file with columns text and label."""
    if not path.is_file():
        raise UserError(f"data={str(path)!r} does not exist: give a csv, tsv or jsonl file with text and label, or"
                        " data='docstrings'.")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                records = [json.loads(line) for line in file if line.strip()]
            else:
                records = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a {path.suffix.removeprefix('.') or 'csv'} file: {error}.") from None
    rows = []
    for number, record in enumerate(records, 1):
        values = [record.get(name) if isinstance(record, dict) else None for name in ("text", "label")]
        if any(value in (None, "") for value in values):
            raise UserError(f"{path}: record {number} has no text or no label; the columns must be called text and"
                            " label.")
        text, label = map(str, values)
        rows.append((text, label, share(text) < FOR_TEST))
    return rows


# ---- sentences that ship with Python ---------------------------------------------------------------------------------

def docstring_rows() -> list:
    """[(first sentence of a docstring, its package, whether held out for the test)], equally many of each package.

    A whole file is held out or none of it, so that near copies of a sentence are on one side. Sentences that name a
    package are left out: they would be no question.
    """
    rows, seen = [], set()
    for package in PACKAGES:
        found = {True: [], False: []}
        wanted = {True: int(SENTENCES * FOR_TEST), False: SENTENCES - int(SENTENCES * FOR_TEST)}
        for path in source_files(package):
            held_out = share(path.name) < FOR_TEST
            if len(found[held_out]) < wanted[held_out]:
                new = [text for text in sentences(path) if text not in seen and not PACKAGE_NAME.search(text)]
                seen.update(new)
                found[held_out] += new
            if all(len(found[side]) >= wanted[side] for side in found):
                break
        if not all(found.values()):
            raise UserError(f"data='docstrings': the installed {package} has no docstrings: give a table.")
        rows += [(text, package, side) for side in found for text in found[side][:wanted[side]]]
    return rows


PACKAGE_NAME = re.compile("|".join((*PACKAGES, "pyplot", r"\bnp\b", r"\bplt\b")), re.IGNORECASE)


def source_files(package: str) -> list:
    """The .py files of a package ('python': the standard library), without tests, in an order that mixes folders."""
    origin = Path(importlib.util.find_spec("json" if package == "python" else package).origin)
    root = origin.parents[1] if package == "python" else origin.parent
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = [name for name in names if not any("test" in part or part.endswith("-packages") for part in name.parts)]
    return [root / name for name in sorted(names, key=lambda name: share(name.as_posix()))]


def sentences(path: Path) -> list:
    """The first paragraph of each docstring of a file, on one line, where it is neither a word nor a page."""
    try:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return []
    texts = [ast.get_docstring(node) or "" for node in nodes
             if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))]
    firsts = [" ".join(text.split("\n\n")[0].split()) for text in texts]
    return list(dict.fromkeys(text for text in firsts if 20 <= len(text) <= 300 and " " in text))
