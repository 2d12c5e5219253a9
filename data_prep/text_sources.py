"""Which files hold the text: files, folders, Kaggle inputs, Hugging Face datasets, the Python standard library.

    files, skipped, text_hash = find_texts(["stdlib", "my_texts/"], max_bytes=10_000_000)   # reads every file

A source is a file (any name), a folder (its text files and tables, recursively), a dataset saved to disk or on the hub
(hf:owner/name:config), or the word `stdlib`: the Python standard library's own source, real text that is on every
machine. A Kaggle input is found by its name, wherever it is mounted. text_documents.py reads what is found here.
"""
import codecs
import dataclasses
import hashlib
import os
import re
import stat
import sys
import sysconfig
from pathlib import Path
from typing import Iterator

import vocabulary_files
from runtime import UserError
from text_documents import LONG_FILE
from text_records import (HUB, KINDS, TextFile, columns_of, compression_errors, has_bad_bytes, kind_of, needed,
                          open_bytes, plain_name)

SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".java", ".js", ".ts", ".go",
            ".rs", ".sh", ".sql", *KINDS)
STDLIB = "stdlib"
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}      # not in every installation
BLOCK = 1024 * 1024         # bytes read at a time by the check

BAD_BYTE = re.compile("[\udc80-\udcff]")       # as "surrogateescape" decodes it
BAD_SHARE = 0.001           # of a long file's bytes: with more, it is text of another encoding, not damaged UTF-8


# ---- which files -----------------------------------------------------------------------------------------------------

def find_texts(sources, max_bytes: int | None = None, say=lambda done, total: None,
               column: str = "text") -> tuple[list[TextFile], list, str]:
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
        try:
            files.append(_checked(candidate, column, digest, left, lambda done: say(total + done, expected)))
            total += candidate.bytes
        except _NotText as reason:
            skipped.append(_skipped(candidate.path, str(reason)))
    if not files:
        first = skipped[0]
        raise UserError(f"There is no text in {_listed(sources)} ({first['file']}: {first['reason']}): give text "
                        "files in UTF-8, or tables and the name of their column.")
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
    if source.startswith(HUB):
        return [TextFile(source, source, Path(source), 0, "dataset")]
    path = Path(sysconfig.get_paths()["stdlib"]) if source == STDLIB else find_input(source)
    if is_saved_dataset(path):
        size = sum(part.stat().st_size for part in path.rglob("*.arrow"))
        return [TextFile(source, path.name, path, size, "dataset")]
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
            return TextFile(source, path.name, path, os.fstat(stream.fileno()).st_size, kind_of(path.name))
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
            if name.startswith(".") or not plain_name(name).endswith(suffixes):
                continue
            try:
                about = path.stat()
            except OSError as error:
                unreadable(error)
            else:
                if stat.S_ISREG(about.st_mode):
                    yield TextFile(source, path.relative_to(top).as_posix(), path, about.st_size, kind_of(name))


def _skipped(path, reason: str) -> dict:
    return {"file": os.fsencode(path).decode("utf-8", "replace"), "reason": reason}     # names may be no UTF-8 either


def _by_name(file: TextFile) -> tuple:
    return file.name, file.source


def _spread(file: TextFile) -> tuple:
    return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape")).digest(), file.source


def _listed(sources) -> str:
    names = [str(source) for source in sources]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def find_input(source) -> Path:
    """A path as it is, or the Kaggle input of that name: inputs lie at different depths, and have moved before.

    Says which it found. Raises UserError when several have the name.
    """
    path = Path(source)
    if os.path.lexists(path) or str(source).startswith((".", "~")):
        return path
    wanted = re.sub(r"^/kaggle/input/(datasets/[^/]+/|notebooks/[^/]+/)?", "", str(source)).strip("/")
    if not wanted or wanted.startswith("..") or os.path.isabs(source) and "/kaggle/input/" not in str(source):
        return path
    found = [folder / wanted for folder in vocabulary_files.folders_below(vocabulary_files.INPUTS)
             if os.path.exists(folder / wanted)]
    others = [other for other in found[1:] if found[0] not in other.parents]
    if others:
        raise UserError(f"Several Kaggle inputs are called {wanted}: {found[0]}, {', '.join(map(str, others[:3]))}; "
                        "name one of them with its whole path.")
    if found:
        print(f"{source}: found as {found[0]}")
    return found[0] if found else path


def is_saved_dataset(path) -> bool:
    """Whether a folder was written by save_to_disk of the package datasets."""
    return any(os.path.isfile(Path(path) / name) for name in ("dataset_dict.json", "state.json"))


# ---- is it text? -----------------------------------------------------------------------------------------------------

class _NotText(Exception):
    pass


def _checked(file: TextFile, column: str, digest, limit: int | None, say) -> TextFile:
    """The file, its name and content (of text about `limit` bytes) in the digest. Raises _NotText with the reason."""
    content = hashlib.blake2b(file.name.encode("utf-8", "surrogateescape") + b"\0", digest_size=16)
    try:
        if file.kind == "text":
            file = dataclasses.replace(file, text_bytes=_read_as_text(file.path, content, limit, say))
        else:
            _check_columns(file, column)
            _read_as_it_is(file, content, say)
    except compression_errors() as error:
        raise _NotText(f"damaged, cannot be decompressed ({error or type(error).__name__})") from error
    except OSError as error:
        raise _NotText(f"cannot be read ({error.strerror or error})") from error
    digest.update(content.digest())
    return file


def _check_columns(file: TextFile, column: str) -> None:
    arrow = (needed("pyarrow", file.name).ArrowException,) if file.kind == "parquet" else ()
    try:
        columns = columns_of(file)
    except arrow as error:
        raise _NotText(f"damaged ({str(error).splitlines()[0][:100]})") from error
    if column not in columns:
        names = ", ".join(columns[:8]) + (", ..." if len(columns) > 8 else "")
        raise _NotText(f"has no column {column!r}" + (f", but {names}: name one as column" if names else ""))


def _read_as_it_is(file: TextFile, content, say) -> None:
    """A table's bytes into the digest; of a dataset on the hub only its name, for its bytes are not here."""
    if str(file.path).startswith(HUB):
        return
    done = 0
    for path in sorted(file.path.rglob("*.arrow")) if file.kind == "dataset" else [file.path]:
        with open(path, "rb") as stream:
            while block := stream.read(BLOCK):
                content.update(block)
                done += len(block)
                say(done)


def _read_as_text(path: Path, content, limit: int | None, say) -> int:
    """Read a text file, about `limit` bytes of it; how many there were, decompressed. Raises _NotText."""
    decoder, done, characters, bad = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), 0, 0, 0
    with open_bytes(path) as (stream, tell):
        while limit is None or done < limit + LONG_FILE:
            block = stream.read(BLOCK)
            if done == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise _NotText("UTF-16: save it as UTF-8")
            if b"\0" in block:
                raise _NotText("holds zero bytes, so it is no plain text")
            text = decoder.decode(block, final=not block)
            characters += len(text)
            bad += len(BAD_BYTE.findall(text)) if has_bad_bytes(text) else 0
            content.update(block)
            done += len(block)
            say(tell())
            if not block:
                break
    if not characters:
        raise _NotText("empty")
    if bad > (BAD_SHARE * done if done > LONG_FILE else 0):
        raise _NotText("not valid UTF-8")
    return done
