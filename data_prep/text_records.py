"""The files that hold text, plain or as .gz and .zst, and the records of tables: .jsonl, .csv, .parquet (one column),
and datasets of Hugging Face, saved to disk or streamed from the hub.

    for number, text, reason in RECORDS[file.kind](file, "text", Position()): ...

Where a record has no text to use, text is None and reason says what is wrong.

pyarrow, zstandard and datasets are needed for their own files only.
"""
import contextlib
import csv
import gzip
import importlib
import io
import json
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from runtime import UserError

LONGEST_LINE = 64 * 2 ** 20     # bytes of a line of .jsonl: what is longer is no record, and would fill the memory
ROWS_AT_ONCE = 256
HUB = "hf:"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
LINES_FOR_COLUMNS = 100         # of a .jsonl are looked at for the names of its columns: the first may be damaged


@dataclass(frozen=True)
class TextFile:
    """A file or dataset to read. `name` is its path within its source, the same on every machine."""
    source: str
    name: str
    path: Path
    bytes: int              # on the disk
    kind: str = "text"      # text, jsonl, csv, parquet, dataset
    text_bytes: int = 0     # of a text file that was checked: after decompression


class Position:
    """Where the reading of one file is, in bytes of the file; the reading functions fill it in."""

    def __init__(self):
        self.tell = lambda: 0


def kind_of(name: str) -> str:
    """text, jsonl, csv or parquet, by a file's name without .gz or .zst."""
    return KINDS.get(Path(plain_name(name)).suffix, "text")


def plain_name(name: str) -> str:
    name = name.lower()
    return name.removesuffix(".gz").removesuffix(".zst")


def needed(package: str, what: str):
    """An optional package. Raises UserError, one sentence, where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise UserError(f"{what} needs the package {name}, which is not installed: pip install {name}.") from error


# ---- bytes of a file -------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def open_bytes(path):
    """The decompressed bytes of a file as a stream, and a function that says how many of the file's were read."""
    name = str(path).lower()
    with open(path, "rb") as raw:
        if name.endswith(".gz"):
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw)), raw.tell
        elif name.endswith(".zst"):
            zstandard = needed("zstandard", f"{path}, compressed by Zstandard,")
            yield io.BufferedReader(_ZstdStream(raw, zstandard.ZstdDecompressor()), 2 ** 17), raw.tell
        else:
            yield raw, raw.tell


class _ZstdStream(io.RawIOBase):
    """The content of all frames of a .zst file. The package's own stream takes one that breaks off for a whole one."""

    def __init__(self, raw, decompressor):
        self.raw, self.decompressor, self.frame, self.ahead, self.content = raw, decompressor, None, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not len(self.content):
            packed = self.ahead or self.raw.read(2 ** 14)
            if not packed and self.frame:
                raise EOFError("the compressed file ends in the middle")
            if not packed:
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            self.content, self.ahead = memoryview(self.frame.decompress(packed)), self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        size = min(len(buffer), len(self.content))
        buffer[:size], self.content = self.content[:size], self.content[size:]
        return size


def compression_errors() -> tuple:
    """What reading a damaged .gz or .zst raises."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, zlib.error, gzip.BadGzipFile, *([zstandard.ZstdError] if zstandard else []))


def has_bad_bytes(text: str) -> bool:
    """Whether the text was read from bytes that are no UTF-8, which "surrogateescape" keeps as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


# ---- records: (number, text or None, what is wrong or "") ------------------------------------------------------------

Records = Iterator[tuple[int, str | None, str]]
REST_LOST = "the file is damaged here, its rest is lost"


def _lines_of_json(file: TextFile, column: str, position: Position) -> Records:
    with open_bytes(file.path) as (stream, position.tell):
        for number, line in enumerate(_lines(stream), 1):
            if line is None:
                yield number, None, REST_LOST
            elif len(line) >= LONGEST_LINE:
                yield number, None, f"a line of more than {LONGEST_LINE:,} bytes, skipped"
            elif line.strip():
                yield number, *_from_json(line, column)


def _lines(stream) -> Iterator[bytes | None]:
    """Lines, each of at most LONGEST_LINE bytes, the rest of which is dropped; None where the stream breaks off."""
    try:
        while line := stream.readline(LONGEST_LINE):
            rest = line
            while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                rest = stream.readline(LONGEST_LINE)
            yield line
    except compression_errors():
        yield None


def _from_json(line: bytes, column: str) -> tuple[str | None, str]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        return None, "bad bytes, skipped"
    except (ValueError, RecursionError):
        return None, "no JSON, skipped"
    return _from_value(record.get(column) if isinstance(record, dict) else None)


def _from_value(value) -> tuple[str | None, str]:
    return (value, "") if isinstance(value, str) and value else (None, "no text, skipped")


def _rows_of_csv(file: TextFile, column: str, position: Position) -> Records:
    csv.field_size_limit(LONGEST_LINE)      # 128 KiB otherwise, less than many a document
    with open_bytes(file.path) as (stream, position.tell):
        rows = csv.reader(io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline=""))
        place, number = next(rows).index(column), 0
        while True:
            number += 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error:
                yield number, None, "no row of a table, skipped"
                continue
            except compression_errors():
                yield number, None, REST_LOST
                return
            if row:
                yield number, *_from_cell(row[place] if place < len(row) else None)


def _from_cell(value: str | None) -> tuple[str | None, str]:
    return (None, "bad bytes, skipped") if value and has_bad_bytes(value) else _from_value(value)


def _rows_of_parquet(file: TextFile, column: str, position: Position) -> Records:
    arrow, parquet = needed("pyarrow", file.name), needed("pyarrow.parquet", file.name)
    number = 0
    with parquet.ParquetFile(file.path) as table:
        rows = max(1, table.metadata.num_rows)
        position.tell = lambda: file.bytes * number // rows
        try:
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    yield number, *_from_arrow(value)
        except (arrow.ArrowException, OSError):
            yield number + 1, None, REST_LOST


def _from_arrow(value) -> tuple[str | None, str]:
    try:
        value = value.as_py()
        return _from_value(value.decode() if isinstance(value, bytes) else value)
    except UnicodeDecodeError:
        return None, "bad bytes, skipped"


def open_dataset(path):
    """The training split of a Hugging Face dataset: saved to disk, or streamed from the hub as hf:name:config:split.

    Raises UserError for whatever keeps it from being opened.
    """
    datasets = needed("datasets", f"{path}, a Hugging Face dataset,")
    try:
        if not str(path).startswith(HUB):
            found = datasets.load_from_disk(str(path))
            return found["train"] if isinstance(found, datasets.DatasetDict) else found
        name, config, split = (str(path).removeprefix(HUB).split(":") + ["", ""])[:3]
        return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as error:      # the network, a missing name, a private one: the library raises many kinds
        reason = (str(error).splitlines() or [""])[0][:200].rstrip(".")
        raise UserError(f"{path} cannot be opened as a Hugging Face dataset ({type(error).__name__}: {reason}): "
                        "correct the name (hf:owner/name:config), or switch the internet on.") from error


def _rows_of_dataset(file: TextFile, column: str, position: Position) -> Records:
    number, dataset = 0, open_dataset(file.path)
    rows = getattr(dataset, "num_rows", 0)
    position.tell = lambda: file.bytes * number // max(1, rows)
    batches = dataset.select_columns([column]).iter(batch_size=ROWS_AT_ONCE)
    while True:
        try:
            values = next(batches)[column]
        except StopIteration:
            return
        except Exception as error:      # of the network or of a damaged file: the library raises many kinds
            raise UserError(f"{file.path} broke off after {number:,} records ({type(error).__name__}: "
                            f"{str(error)[:200]}): run it again to go on.") from error
        for value in values:
            number += 1
            yield number, *_from_value(value)


RECORDS = {"jsonl": _lines_of_json, "csv": _rows_of_csv, "parquet": _rows_of_parquet, "dataset": _rows_of_dataset}


def columns_of(file: TextFile) -> list[str]:
    """The names of a file's columns; for .jsonl those of its first record. [] where none can be read."""
    if file.kind == "parquet":
        parquet = needed("pyarrow.parquet", file.name)
        with parquet.ParquetFile(file.path) as table:
            return table.schema_arrow.names
    if file.kind == "dataset":
        dataset = open_dataset(file.path)
        return dataset.column_names or list(next(iter(dataset), {}))
    with open_bytes(file.path) as (stream, _):
        if file.kind == "csv":
            return next(csv.reader(io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")), [])
        for line, _ in zip(_lines(stream), range(LINES_FOR_COLUMNS)):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line or b""), dict):
                    return list(record)
    return []
