"""Documents from files, folders and the Python standard library, and which of them are held out for validation.

    files, skipped, text_hash = find_texts(["stdlib", "my_texts/"], max_bytes=10_000_000)   # reads every file
    for document in read_documents(files[0], val_fraction=0.1): ...

A source is a file (any name), a folder (its plain-text files, recursively) or the word `stdlib`: the Python standard
library's own source, real text that is on every machine.

A file is one document, unless it is longer than LONG_FILE: then it is cut at line ends into pieces of about PIECE, each
a document of its own, so that one big file can be divided into train and val, and is never held in memory whole.

A document's split follows from its own text alone: adding files moves no document between train and val, and two copies
of a text land on the same side. The pieces of a long file start at such a place and are then held out evenly.
"""
import codecs
import hashlib
import os
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from runtime import UserError

SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go",
            ".rs", ".sh", ".sql")
STDLIB = "stdlib"
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}      # not in every installation
LONG_FILE = 64 * 1024       # bytes: longer files are cut
PIECE = 16 * 1024           # characters: at val_fraction 0.1, ten pieces (160 KB of text) always hold out one
BLOCK = 1024 * 1024         # bytes read at a time by the check


@dataclass(frozen=True)
class TextFile:
    """A file that was read to its end and is text. `name` is its path within its source, the same on every machine."""
    source: str
    name: str
    path: Path
    bytes: int


@dataclass(frozen=True)
class Document:
    text: str
    split: str          # "train" or "val"
    least_share: float  # the smallest val_fraction that holds out this document or, in a long file, one before it


# ---- which files -----------------------------------------------------------------------------------------------------

def find_texts(sources, max_bytes: int | None = None, say=lambda done, total: None) -> tuple[list[TextFile], list, str]:
    """The readable text files of all sources, what was skipped and why, and a hash of all names and contents.

    max_bytes: take files until this much is reached, in the order of their names' hashes, so that they are a spread.
    say: called now and then with the bytes read and to read. skipped: [{"file": path, "reason": words}].
    Raises UserError for a source that is missing or cannot be read, and when no text is left.
    """
    candidates, skipped = _candidates(sources)
    expected = min(sum(file.bytes for file in candidates), max_bytes or sys.maxsize)
    digest, files, total = hashlib.blake2b(digest_size=16), [], 0
    for candidate in sorted(candidates, key=_spread if max_bytes else _by_name):
        if max_bytes and total >= max_bytes:
            break
        left = max_bytes - total if max_bytes else None
        reason = _why_not_text(candidate, digest, left, lambda done: say(total + done, expected))
        if reason is None:
            files.append(candidate)
            total += candidate.bytes
        else:
            skipped.append(_skipped(candidate.path, reason))
    if not files:
        first = skipped[0]
        raise UserError(f"There is no text in {_listed(sources)} ({first['file']}: {first['reason']}): give text "
                        "files in UTF-8.")
    return files, skipped, digest.hexdigest()


def _candidates(sources) -> tuple[list[TextFile], list[dict]]:
    """Every file that may hold text, once, whatever way it was named."""
    candidates, skipped = {}, []
    for source in sources:
        found = _files_of(str(source), skipped)
        for file in found:
            candidates.setdefault(os.path.realpath(file.path), file)
    return list(candidates.values()), skipped


def _files_of(source: str, skipped: list) -> list[TextFile]:
    path = Path(sysconfig.get_paths()["stdlib"] if source == STDLIB else source)
    if source == STDLIB and not os.path.isdir(path):
        raise UserError(f"This Python has no readable standard library at {path}: name a file or folder of text.")
    if os.path.isdir(path):
        suffixes, left_out = ((".py",), STDLIB_LEFT_OUT) if source == STDLIB else (SUFFIXES, set())
        found = list(_walk(source, path, suffixes, left_out, skipped))
        if not found:
            raise UserError(f"The folder {path} holds no text files that can be read ({' '.join(suffixes)}): name the "
                            "files themselves, or another folder.")
        return found
    return [_named_file(source, path)]


def _named_file(source: str, path: Path) -> TextFile:
    if os.path.exists(path) and not os.path.isfile(path):       # reading a pipe or device might never end
        raise UserError(f"{path} is neither a file nor a folder: name a text file.")
    try:
        with open(path, "rb") as stream:
            stream.read(1)
            return TextFile(source, path.name, path, os.fstat(stream.fileno()).st_size)
    except FileNotFoundError as error:
        raise UserError(f"There is no file or folder {path}: correct it, or say {STDLIB} for Python's own source."
                        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions or leave it out.") from error


def _walk(source: str, top: Path, suffixes: tuple, left_out: set, skipped: list) -> Iterator[TextFile]:
    def unreadable(error: OSError) -> None:
        skipped.append(_skipped(error.filename, f"cannot be read ({error.strerror})"))

    for folder, folders, names in os.walk(top, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        for name in names:
            path = Path(folder) / name
            if name.startswith(".") or not name.lower().endswith(suffixes):
                continue
            try:
                about = path.stat()
            except OSError as error:
                unreadable(error)
            else:
                if stat.S_ISREG(about.st_mode):
                    yield TextFile(source, path.relative_to(top).as_posix(), path, about.st_size)


def _skipped(path, reason: str) -> dict:
    return {"file": os.fsencode(path).decode("utf-8", "replace"), "reason": reason}     # names may be no UTF-8 either


def _by_name(file: TextFile) -> tuple:
    return file.name, file.source


def _spread(file: TextFile) -> tuple:
    return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape")).digest(), file.source


def _listed(sources) -> str:
    names = [str(source) for source in sources]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _why_not_text(file: TextFile, digest, limit: int | None, say) -> str | None:
    """The reason why a file is no text, or None: then its name and content (about `limit` bytes) are in the digest."""
    content = hashlib.blake2b(file.name.encode("utf-8", "surrogateescape") + b"\0", digest_size=16)
    try:
        _read_as_text(file.path, content, limit, say)
    except UnicodeDecodeError:
        return "not valid UTF-8"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except _NotText as reason:
        return str(reason)
    digest.update(content.digest())
    return None


class _NotText(Exception):
    pass


def _read_as_text(path: Path, content, limit: int | None, say) -> None:
    decoder, done, characters = codecs.getincrementaldecoder("utf-8-sig")(), 0, 0
    with open(path, "rb") as stream:
        while limit is None or done < limit + LONG_FILE:
            block = stream.read(BLOCK)
            if done == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise _NotText("UTF-16: save it as UTF-8")
            if b"\0" in block:
                raise _NotText("holds zero bytes, so it is no plain text")
            characters += len(decoder.decode(block, final=not block))
            content.update(block)
            done += len(block)
            say(done)
            if not block:
                break
    if not characters:
        raise _NotText("empty")


# ---- documents -------------------------------------------------------------------------------------------------------

def read_documents(file: TextFile, val_fraction: float) -> Iterator[Document]:
    """The documents of one file, in order; a long one is streamed. Raises UserError if the file has changed since."""
    try:
        with open(file.path, encoding="utf-8-sig", newline="") as stream:       # "": line ends stay as they are
            for number, text in enumerate(_pieces(stream) if file.bytes > LONG_FILE else (stream.read(),)):
                start = _start(text) if number == 0 else start
                split = "val" if is_held_out(start, number, val_fraction) else "train"
                yield Document(text, split, least_share=(1 - start) / (number + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} has changed while it was being prepared ({error}): run it again.") from error


def _start(text: str) -> float:
    """A number in [0, 1) that only this text has, near enough."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2 ** 48


def is_held_out(start: float, number: int, val_fraction: float) -> bool:
    """Whether piece `number` of a file is val: one in 1 / val_fraction, evenly. start, the file's own, is in [0, 1)."""
    return int(start + (number + 1) * val_fraction) > int(start + number * val_fraction)


def _pieces(stream) -> Iterator[str]:
    """About PIECE characters up to the next line end; a line that goes on and on is cut."""
    while piece := stream.read(PIECE) + stream.readline(PIECE):
        yield piece
