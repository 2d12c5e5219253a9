"""Token files that other projects made, read where they lie, without converting them. numpy only.

    manifest = describe("/kaggle/input/edufineweb10b")      # None when the folder holds none; token_data calls this

| made by | file | what it looks like |
|---|---|---|
| nanoGPT | train.bin, val.bin | raw little-endian uint16, nothing else (uint32 is recognised) |
| llm.c, modded-nanogpt | *_train_000001.bin, *_val_000000.bin | 256 int32 (magic 20240520, version, count), uint16 |
| the same for Llama 3 | | magic 20240801, then uint32 |
| build-nanogpt, FineWeb-Edu dumps | *_train_000001.npy, *_val_000000.npy | numpy's header, one row of integers |

Which split a file belongs to is said by its name, or by a folder train/ or val/. A raw file says nothing about itself,
so all of it is read once: ids, blocks of zeros, whether it is text or noise. The findings are kept in the temporary
folder of this machine, so that eight processes and a resume need not read it again.
"""
import hashlib
import json
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import UserError

FINDINGS_VERSION = 1                    # another one forgets what was found before
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
OWN_NAME = re.compile(r"(train|val)_\d{5}\.bin")     # of shards that lost their manifest: never taken for nanoGPT's
LLM_C = {20240520: ("gpt2", 1, "<u2"), 20240801: ("llama3", 7, "<u4")}      # magic: encoding, version, dtype
LLM_C_HEADER, LLM_C_QUESTIONS = 1024, 20240522
VOCABULARIES = {"gpt2": (50257, 50256), "llama3": (128256, 128000)}     # ids, separator
ZERO_BLOCK = 4096                       # tokens: so many zeros in a row are a hole in the file, never text
SAMPLE = 65536                          # tokens looked at to tell tokens from text and noise
LEAST_TOP_TEN = 0.03                    # share of the ten most frequent ids; Python source: 58 % (gpt2), 21 % (cl100k)
READ_BYTES = 2 ** 23


@dataclass(frozen=True)
class TokenFile:
    name: str           # path within the folder, with /
    split: str
    kind: str           # nanoGPT, llm.c or npy
    encoding: str       # gpt2, llama3, or "" where the file does not say
    dtype: str          # numpy's name, little-endian
    offset: int         # bytes before the first token
    tokens: int


def describe(folder) -> dict | None:
    """What a manifest would say about the token files in a folder, all of them verified; None when it has none.

    A shard has the additional fields `dtype` and `offset`; text bytes are unknown, which is 0. Raises UserError for
    files that are not what they seem to be: which, what was seen, what to do.
    """
    folder = Path(folder)
    names = token_file_names(folder)
    if not names:
        return None
    _check_names(folder, names)
    files = [look_at(folder, name, split) for name, split in names.items() if split]
    kept = _findings_path(folder, files)
    try:
        return json.loads(kept.read_text())
    except (OSError, ValueError):
        manifest = _manifest(files, _read_all(folder, files), folder)
    _keep(kept, manifest)
    _say(folder, manifest)
    return manifest


def has_token_files(folder, look: bool = False) -> bool:
    """Whether a folder has .bin or .npy files for train and for val; `look`: whose beginnings are right as well."""
    names = token_file_names(Path(folder))
    if not {"train", "val"} <= set(names.values()):
        return False
    try:
        return not look or all(look_at(Path(folder), name, split) for name, split in names.items() if split)
    except UserError:
        return False


def token_file_names(folder: Path) -> dict[str, str | None]:
    """{name: split, or None where no word of the name says it} of the .bin and .npy files that may hold tokens."""
    found = {}
    for place in ("", *SPLITS):
        try:
            listed = sorted(os.listdir(folder / place))
        except OSError:
            continue
        for name in listed:
            if name.endswith((".bin", ".npy")) and not OWN_NAME.fullmatch(name) and (folder / place / name).is_file():
                found[f"{place}/{name}" if place else name] = split_of(f"{place} {Path(name).stem}")
    return found


def split_of(name: str) -> str | None:
    """`train` or `val`, by the first word of a name that says it: edufineweb_val_000000 is val, training_args none."""
    words = re.findall("[a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def _check_names(folder: Path, names: dict) -> None:
    missing = [split for split in ("train", "val") if split not in names.values()]
    if missing:
        shown = ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UserError(f"{folder} holds {shown}, but no name says {' and none says '.join(missing)}: name the files "
                        "as in fineweb_train_000001.bin and fineweb_val_000000.bin (a folder of links will do).")


# ---- one file --------------------------------------------------------------------------------------------------------

def look_at(folder: Path, name: str, split: str) -> TokenFile:
    """Recognise a file by its beginning. Raises UserError when its length or header cannot be right."""
    path = folder / name
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            start = stream.read(LLM_C_HEADER)
            if name.endswith(".npy"):
                return TokenFile(name, split, "npy", "", *_npy_header(path, stream, size))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check its permissions.") from error
    header = np.frombuffer(start[:len(start) // 4 * 4], "<i4")
    magic = int(header[0]) if len(header) else 0
    if magic == LLM_C_QUESTIONS:
        raise UserError(f"{path} holds llm.c's test questions (magic {magic}), not tokens to train on: leave it out.")
    if magic in LLM_C and len(header) == 256:
        return TokenFile(name, split, "llm.c", LLM_C[magic][0], *_llm_c_header(path, header, size))
    return TokenFile(name, split, "nanoGPT", "", *_raw(path, size))


def _llm_c_header(path: Path, header: np.ndarray, size: int) -> tuple[str, int, int]:
    (magic, version, tokens), (_, known, dtype) = map(int, header[:3]), LLM_C[int(header[0])]
    if version != known:
        raise UserError(f"{path} has llm.c's magic {magic} and version {version}, of which only {known} is known: make "
                        "it again with a current llm.c.")
    return dtype, LLM_C_HEADER, _whole(path, tokens, LLM_C_HEADER, dtype, size)


def _npy_header(path: Path, stream, size: int) -> tuple[str, int, int]:
    stream.seek(0)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
    except (ValueError, KeyError, EOFError) as error:
        raise UserError(f"{path} is no .npy file that numpy can read ({error}): copy it again.") from error
    if len(shape) != 1 or dtype.str not in ("<u2", "<u4", "<i4"):
        raise UserError(f"{path} holds {dtype} in the shape {shape}, not one row of token ids: save them as a "
                        "one-dimensional array of uint16 or uint32.")
    return dtype.str, stream.tell(), _whole(path, shape[0], stream.tell(), dtype, size)


def _whole(path: Path, tokens: int, offset: int, dtype, size: int) -> int:
    expected = offset + tokens * np.dtype(dtype).itemsize
    if size != expected:
        raise UserError(f"{path} has {size:,} bytes where its header says {expected:,} ({tokens:,} tokens of "
                        f"{np.dtype(dtype).name}): it was cut short or damaged, copy it again.")
    return tokens


def _raw(path: Path, size: int) -> tuple[str, int, int]:
    dtype = _raw_dtype(path, size)
    if size % 2:
        raise UserError(f"{path} has {size:,} bytes, no whole number of uint16 tokens, and no header of llm.c: it was "
                        "cut short, or holds something else.")
    return dtype, 0, size // np.dtype(dtype).itemsize


def _raw_dtype(path: Path, size: int) -> str:
    """uint16, or uint32 where every second number is tiny as the upper half of an id is. Raises UserError for text."""
    ids = _sample(path, 0, "<u2", size // 2)
    content = ids.view(np.uint8)
    printable = ((content >= 32) & (content < 127)) | ((content >= 9) & (content <= 13))
    if len(content) and printable.mean() > 0.95:
        seen = bytes(content[:24]).decode("ascii", "replace")
        raise UserError(f"{path} is text, not tokens (it holds {seen!r}): prepare it with data_prep/prepare.py.")
    low, high = ids[0::2], ids[1::2]
    if len(high) < 128 or size % 4 or not high.max() < 16 <= low.max():
        return "<u2"
    if not low[1::2].any():
        raise UserError(f"{path} looks like int64 (three of four numbers of uint16 are zero or tiny), which nobody "
                        "expects in such a file: save the ids as uint16 or uint32.")
    return "<u4"


def _sample(path: Path, offset: int, dtype: str, tokens: int) -> np.ndarray:
    """At most SAMPLE tokens from the middle of a file."""
    first = max(0, tokens - SAMPLE) // 2 // 2 * 2
    return np.fromfile(path, dtype, SAMPLE, offset=offset + first * np.dtype(dtype).itemsize)


# ---- all that they hold ----------------------------------------------------------------------------------------------

def _read_all(folder: Path, files: list[TokenFile]) -> list[dict]:
    """Each file read to its end: {"sha256", "max_id", "gpt2": GPT-2's separator is there}. Says how far it is."""
    total = sum(file.tokens * np.dtype(file.dtype).itemsize for file in files)
    done, said = [0], [time.monotonic()]

    def say(size: int) -> None:         # from several threads: a number that is a little late does not matter
        done[0] += size
        if time.monotonic() - said[0] > 5:
            said[0] = time.monotonic()
            print(f"looking through {folder}, once: {done[0] / 1e6:,.0f} of {total / 1e6:,.0f} MB", flush=True)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file: _read_through(folder / file.name, file, say), files))


def _read_through(path: Path, file: TokenFile, say) -> dict:
    _check_sample(path, file, _sample(path, file.offset, file.dtype, file.tokens))
    digest, largest, gpt2, position = hashlib.sha256(), 0, False, 0
    with open(path, "rb") as stream:
        stream.seek(file.offset)
        while block := stream.read(READ_BYTES):
            ids = np.frombuffer(block, file.dtype)
            _check_block(path, file, ids, position)
            digest.update(block)
            largest, gpt2 = max(largest, int(ids.max())), gpt2 or bool((ids == 50256).any())
            position += len(ids)
            say(len(block))
    return {"sha256": digest.hexdigest(), "max_id": largest, "gpt2": gpt2}


def _check_sample(path: Path, file: TokenFile, sample: np.ndarray) -> None:
    """A text has frequent tokens, whatever the tokenizer. Raises UserError for weights, pixels, compressed data."""
    if len(sample) < SAMPLE // 2:
        return
    counts = np.sort(np.unique(sample, return_counts=True)[1])
    share = counts[-10:].sum() / len(sample)
    if share < LEAST_TOP_TEN:
        raise UserError(f"{path}, read as {file.kind} {np.dtype(file.dtype).name}, looks like noise (its ten most "
                        f"frequent numbers are {share:.1%} of it, of a text's tokens they are 10% and more): it is "
                        "compressed, or holds something else than tokens.")


def _check_block(path: Path, file: TokenFile, ids: np.ndarray, position: int) -> None:
    if ids.dtype.kind == "i" and ids.min() < 0:
        raise UserError(f"{path} holds the number {ids.min()} in {file.dtype}, which is no token id: it was made with "
                        "another type or damaged.")
    parts = ids[:len(ids) // ZERO_BLOCK * ZERO_BLOCK].reshape(-1, ZERO_BLOCK)
    if len(empty := np.flatnonzero(parts.max(1, initial=0) == 0)):
        raise UserError(f"{path} holds nothing but zeros for {ZERO_BLOCK:,} tokens from token "
                        f"{position + empty[0] * ZERO_BLOCK:,} on (of {file.tokens:,}): an incomplete download or a "
                        "file that was never filled, copy it again.")


def _manifest(files: list[TokenFile], found: list[dict], folder: Path) -> dict:
    largest = max(entry["max_id"] for entry in found)
    encoding = _encoding(folder, files, largest, any(entry["gpt2"] for entry in found))
    vocabulary, separator = VOCABULARIES.get(encoding, (largest + 1, None))
    splits = {name: {"tokens": 0, "bytes": 0, "documents": 0, "shards": []} for name in ("train", "val")}
    for file, entry in zip(files, found):
        splits[file.split]["tokens"] += file.tokens
        splits[file.split]["shards"].append({"file": file.name, "tokens": file.tokens, "sha256": entry["sha256"],
                                             "max_id": entry["max_id"], "dtype": file.dtype, "offset": file.offset})
    return {"format": ", ".join(sorted({file.kind for file in files})), "dtype": np.dtype(files[0].dtype).name,
            "vocab_size": vocabulary, "separator": separator, "encoding": encoding, "reference": {}, "splits": splits}


def _encoding(folder: Path, files: list[TokenFile], largest: int, separator_seen: bool) -> str:
    said = {file.encoding for file in files}
    if len(said) > 1:
        kinds = ", ".join(f"{file.name} ({file.kind} {file.encoding})" for file in files if file.encoding)
        raise UserError(f"{folder} mixes files of several tokenizers, among them {kinds[:200]}: give each a folder of "
                        "its own.")
    if said != {""}:
        return said.pop()
    return "gpt2" if largest <= 50256 and (separator_seen or largest > 32768) else "unknown"


# ---- what was found, kept --------------------------------------------------------------------------------------------

def _findings_path(folder: Path, files: list[TokenFile]) -> Path:
    about = [[vars(file), os.stat(folder / file.name).st_mtime_ns] for file in files]
    key = hashlib.sha256(json.dumps([FINDINGS_VERSION, os.path.realpath(folder), about]).encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir()) / f"token-files-{os.getuid()}" / f"{key}.json"


def _keep(path: Path, manifest: dict) -> None:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(manifest))
        os.replace(temporary, path)
    except OSError:         # every process reads the files itself then
        pass


def _say(folder: Path, manifest: dict) -> None:
    sizes = ", ".join(f"{name} {split['tokens']:,} tokens in {len(split['shards'])} files"
                      for name, split in manifest["splits"].items())
    largest = max(shard["max_id"] for split in manifest["splits"].values() for shard in split["shards"])
    encoding = {"unknown": "a tokenizer that is not known"}.get(manifest["encoding"], manifest["encoding"])
    print(f"{folder}: {manifest['format']} token files ({manifest['dtype']}), {sizes}; ids up to {largest:,}, taken "
          f"for those of {encoding}")
