"""The documents of one file, and which of them are held out for validation.

    for document in read_documents(file, val_fraction=0.1, column="text", damage=Damage()): ...

A text file is one document, unless it is longer than LONG_FILE: then it is cut at line ends into pieces of about PIECE,
each a document of its own, so that one big file can be divided into train and val, and is never held in memory whole.
A record is a document.

A document's split follows from its own text alone: adding files moves no document between train and val, and two copies
of a text land on the same side. The pieces of a long file start at such a place and are then held out evenly.

A damaged document stops nothing: it is skipped, mended or cut, counted and listed (Damage).
"""
import hashlib
import io
from dataclasses import dataclass
from typing import Iterator

from runtime import UserError
from text_encodings import valid_text
from text_records import RECORDS, Position, TextFile, has_bad_bytes, open_bytes

LONG_FILE = 64 * 1024           # bytes: longer text files are cut
PIECE = 16 * 1024               # characters: at val_fraction 0.1, ten pieces (160 KB of text) always hold out one
LONGEST_DOCUMENT = 1_000_000    # characters: a longer record is cut into documents of the same split
LISTED = 100                    # damaged documents that the manifest lists; all are counted


@dataclass(frozen=True)
class Document:
    text: str
    split: str          # "train" or "val"
    least_share: float  # the smallest val_fraction that holds out this document or, in a long file, one before it
    where: str          # for people


class Damage:
    """Counts of damaged documents by reason, and a list of the first of them."""

    def __init__(self, counts: dict | None = None, listed: list | None = None):
        self.counts, self.listed, self.listens = dict(counts or {}), list(listed or []), True

    def add(self, where: str, reason: str) -> None:
        if not self.listens:
            return
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(self.listed) < LISTED:
            self.listed.append({"document": where.encode("utf-8", "replace").decode(), "reason": reason})

    def state(self) -> dict:
        return {"counts": dict(self.counts), "listed": list(self.listed)}

    def with_those_of(self, other: "Damage") -> dict:
        counts = {reason: self.counts.get(reason, 0) + other.counts.get(reason, 0)
                  for reason in sorted({*self.counts, *other.counts})}
        return {"counts": counts, "listed": self.listed + other.listed}


class DocumentReader:
    """Iterates over the documents of all files, in order, and knows its place, from which another one can go on.

    max_bytes: stop at about this much text, up to a document more.
    """

    def __init__(self, files: list[TextFile], val_fraction: float, column: str = "text", max_bytes: int | None = None):
        self.files, self.val_fraction, self.column, self.max_bytes = files, val_fraction, column, max_bytes
        self.file = self.number = self.taken = 0        # the file, its documents and all text bytes that were given out
        self.damage, self.position = Damage(), Position()

    def place(self) -> dict:
        return {"file": self.file, "number": self.number, "taken": self.taken, "damage": self.damage.state()}

    def go_to(self, place: dict) -> None:
        """Before iterating: begin after the documents that were given out when `place` was taken."""
        self.file, self.number, self.taken = place["file"], place["number"], place["taken"]
        self.damage = Damage(**place["damage"])

    def done(self) -> tuple[int, int]:
        """Bytes read and to read, of the files or of the limit, for a progress bar."""
        if self.max_bytes:
            return self.taken, self.max_bytes
        before = sum(file.bytes for file in self.files[:self.file])
        return before + self.position.tell(), sum(file.bytes for file in self.files)

    def __iter__(self) -> Iterator[Document]:
        while self.file < len(self.files):
            seen, self.damage.listens = self.number, self.number == 0       # the damage before the place is known
            file = self.files[self.file]
            documents = read_documents(file, self.val_fraction, self.column, self.damage, self.position)
            for number, document in enumerate(documents, 1):
                if number > seen:
                    if self.max_bytes and self.taken >= self.max_bytes:
                        return
                    self.number, self.taken = number, self.taken + len(document.text.encode())
                    yield document
                self.damage.listens = number >= seen
            self.file, self.number, self.position.tell = self.file + 1, 0, lambda: 0


# ---- documents -------------------------------------------------------------------------------------------------------

def read_documents(file: TextFile, val_fraction: float, column: str = "text", damage: Damage | None = None,
                   position: Position | None = None) -> Iterator[Document]:
    """The documents of one file, in order, streamed. damage: counts what is skipped or mended on the way.

    Raises UserError if the file has changed since it was checked, or cannot be read.
    """
    damage, position = damage or Damage(), position or Position()       # nobody looks at them then
    try:
        if file.kind == "text":
            yield from _text_documents(file, val_fraction, damage, position)
        else:
            yield from _record_documents(file, val_fraction, column, damage, position)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} has changed while it was being prepared ({error}): run it again.") from error


def _text_documents(file: TextFile, val_fraction: float, damage: Damage, position: Position) -> Iterator[Document]:
    is_long = max(file.bytes, file.text_bytes) > LONG_FILE
    with open_bytes(file.path) as (stream, position.tell):
        text_stream = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape" if is_long else "strict", newline="")
        for number, text in enumerate(_pieces(text_stream) if is_long else (text_stream.read(),)):
            start = _start(text) if number == 0 else start
            where = f"{file.name}, piece {number + 1}" if is_long else file.name
            if has_bad_bytes(text):
                damage.add(where, "bad bytes, skipped")
                continue
            split = "val" if is_held_out(start, number, val_fraction) else "train"
            yield Document(text, split, (1 - start) / (number + 1), where)
        text_stream.detach()


def _record_documents(file: TextFile, val_fraction: float, column: str, damage: Damage,
                      position: Position) -> Iterator[Document]:
    for number, text, reason in RECORDS[file.kind](file, column, position):
        where = f"{file.name}, record {number}"
        if reason:
            damage.add(where, reason)
        if not isinstance(text, str) or not text:
            continue
        mended = valid_text(text)
        if mended is not text:
            damage.add(where, "lone surrogates, replaced")
        if len(mended) > LONGEST_DOCUMENT:
            damage.add(where, f"longer than {LONGEST_DOCUMENT:,} characters, cut")
        start = _start(mended)
        split = "val" if is_held_out(start, 0, val_fraction) else "train"
        for first in range(0, len(mended), LONGEST_DOCUMENT):
            yield Document(mended[first:first + LONGEST_DOCUMENT], split, 1 - start, where)


def _start(text: str) -> float:
    """A number in [0, 1) that only this text has, near enough."""
    content = text.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2 ** 48


def is_held_out(start: float, number: int, val_fraction: float) -> bool:
    """Whether piece `number` of a file is val: one in 1 / val_fraction, evenly. start, the file's own, is in [0, 1)."""
    return int(start + (number + 1) * val_fraction) > int(start + number * val_fraction)


def _pieces(stream) -> Iterator[str]:
    """About PIECE characters up to the next line end; a line that goes on and on is cut."""
    while piece := stream.read(PIECE) + stream.readline(PIECE):
        yield piece
