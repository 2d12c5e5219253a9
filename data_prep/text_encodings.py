"""Text to token ids: `bytes` (needs nothing), `gpt2` (tiktoken, from a vocabulary file on this machine), or `auto`.

    encoding = get_encoding("auto")                 # gpt2 when its file can be had without network, else bytes
    arrays = encode_documents(encoding, ["one text", "another"])

tiktoken looks for its vocabulary under a hashed name, deletes a file whose content differs, and downloads. None of this
happens here: the file is found by several names in several places, verified by SHA-256, read, and never touched.
Documents are ordinary text: `<|endoftext|>` inside one is thirteen characters, the separator is added by us.
"""
import base64
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Iterator

import numpy as np

from runtime import UserError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_LOOKING = re.compile(r"<\|\w{1,40}\|>")
LONGEST_RUN = 2048          # characters without a change from space to non-space, see bounded_pieces
THREADS = min(32, os.cpu_count() or 1)

BYTES_PATTERN = r"(?s:.{1,100})"        # any split gives the same ids; short pieces are merged fastest
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"    # the same ranks as gpt2


def get_encoding(name: str, allow_download: bool = False):
    """A tiktoken.Encoding for "bytes", "gpt2" or "auto" (it prints which); .n_vocab ids, .eot_token is the separator.

    Where tiktoken is not installed, "bytes" is a ByteEncoding with the same methods. Nothing is downloaded unless
    allow_download. Raises UserError for an unknown name, and when GPT-2's vocabulary cannot be had: which files, where.
    """
    if name == "bytes":
        return bytes_encoding()
    if name == "gpt2":
        return gpt2_encoding(allow_download)
    if name == "auto":
        return _best_encoding(allow_download)
    raise UserError(f"There is no encoding {name!r}: use bytes, gpt2 or auto.")


def _best_encoding(allow_download: bool):
    try:
        encoding = gpt2_encoding(allow_download)
    except UserError as error:
        print(f"encoding: bytes (auto). {error}")
        return bytes_encoding()
    print("encoding: gpt2 (auto)")
    return encoding


def _tiktoken():
    try:
        import tiktoken
        return tiktoken
    except ImportError:
        return None


# ---- bytes -----------------------------------------------------------------------------------------------------------

def bytes_encoding():
    """257 ids: every byte of UTF-8 is its own id, 256 is the separator."""
    tiktoken = _tiktoken()
    if tiktoken is None:
        return ByteEncoding()
    return tiktoken.Encoding("bytes", pat_str=BYTES_PATTERN, mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={END_OF_TEXT: 256}, explicit_n_vocab=257)


class ByteEncoding:
    """What this project uses of tiktoken.Encoding, for machines without tiktoken and without network to install it."""
    name, n_vocab, eot_token = "bytes", 257, 256

    def encode_ordinary(self, text: str) -> list[int]:
        return list(valid_text(text).encode())

    def encode_ordinary_batch(self, texts: list[str], num_threads: int = 1) -> list[list[int]]:
        return [self.encode_ordinary(text) for text in texts]

    def decode_bytes(self, tokens) -> bytes:
        return b"".join(END_OF_TEXT.encode() if token == 256 else bytes([token]) for token in tokens)

    def decode(self, tokens, errors: str = "replace") -> str:
        return self.decode_bytes(tokens).decode(errors=errors)


# ---- gpt2 ------------------------------------------------------------------------------------------------------------

def gpt2_encoding(allow_download: bool = False):
    """GPT-2's tokenizer, 50,257 ids, separator 50256. Raises UserError without tiktoken or its vocabulary."""
    tiktoken = _tiktoken()
    if tiktoken is None:
        raise UserError("The encoding gpt2 needs the package tiktoken: pip install it, or use the encoding bytes.")
    found, rejected = find_gpt2_vocabulary()
    if found is None and allow_download:
        found = _download_vocabulary()
    if found is None:
        raise UserError(_how_to_get_vocabulary(rejected))
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=_ranks(found),
                             special_tokens={END_OF_TEXT: 50256}, explicit_n_vocab=50257)


def _ranks_from_tiktoken(content: bytes) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in content.splitlines())}


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's own files write every byte as one printable letter; the order is also that of ids 0..255."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _ranks_from_merges(content: bytes) -> dict[bytes, int]:
    letters = _letters_of_bytes()
    merges = [line.replace(" ", "") for line in content.decode().split("\n")[1:-1]]
    tokens = [bytes([byte]) for byte in letters.values()] + [bytes(letters[c] for c in merge) for merge in merges]
    return {token: rank for rank, token in enumerate(tokens)}


def _ranks_from_json(content: bytes) -> dict[bytes, int]:
    letters, tokens = _letters_of_bytes(), json.loads(content)
    del tokens[END_OF_TEXT]
    return {bytes(letters[c] for c in token): rank for token, rank in tokens.items()}


# each of the three files alone holds the whole vocabulary: SHA-256 -> how to read it
READERS = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": _ranks_from_tiktoken,
    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5": _ranks_from_merges,
    "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783": _ranks_from_json,
}
CACHE_NAMES = ("0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4", "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
               "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")       # tiktoken's: SHA-1 of the address
FILE_NAMES = ("r50k_base.tiktoken", "gpt2.tiktoken", "vocab.bpe", "merges.txt", "encoder.json") + CACHE_NAMES
INPUTS = Path("/kaggle/input")
MOST_FOLDERS_SEARCHED = 20_000          # an image data set can hold a million; vocabularies lie near the top


def _ranks(content: bytes) -> dict[bytes, int]:
    return READERS[hashlib.sha256(content).hexdigest()](content)


def find_gpt2_vocabulary() -> tuple[bytes | None, list[Path]]:
    """The verified content of a vocabulary file here or None, and the files with a right name but wrong content."""
    rejected = []
    for path in _vocabulary_candidates():
        try:
            content = path.read_bytes() if path.stat().st_size < 2 ** 21 else b""
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() in READERS:
            return content, rejected
        rejected.append(path)
    return None, rejected


def _vocabulary_candidates() -> Iterator[Path]:
    for folder in [*_vocabulary_folders(), *folders_below(INPUTS)]:
        yield from (folder / name for name in FILE_NAMES if (folder / name).is_file())


def _vocabulary_folders() -> list[Path]:
    named = [os.environ[name] for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR") if os.environ.get(name)]
    whisper = importlib.util.find_spec("whisper")       # finds the package's folder, imports nothing
    assets = [Path(place) / "assets" for place in (whisper.submodule_search_locations or ())] if whisper else []
    return [Path(name) for name in named] + [Path(tempfile.gettempdir()) / "data-gym-cache", Path.cwd(), *assets]


def folders_below(top: Path) -> Iterator[Path]:
    """A folder and those below it, breadth first, so that the limit cuts off the deep ones."""
    level, count = [top], 0
    while level and count < MOST_FOLDERS_SEARCHED:
        yield from level
        count += len(level)
        level = [folder for parent in level for folder in _subfolders(parent)]


def _subfolders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []


def _how_to_get_vocabulary(rejected: list[Path]) -> str:
    wrong = f" ({', '.join(map(str, rejected[:3]))} has the right name but other content)" if rejected else ""
    return (f"GPT-2's vocabulary is not on this machine{wrong}: put r50k_base.tiktoken (or vocab.bpe, or encoder.json) "
            f"into the folder that TIKTOKEN_CACHE_DIR names, into {Path.cwd()} or into a Kaggle input, or allow the "
            "download, or use the encoding bytes.")


def _download_vocabulary() -> bytes:
    import requests         # tiktoken depends on it
    try:
        answer = requests.get(GPT2_URL, timeout=30)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise UserError(f"GPT-2's vocabulary could not be downloaded from {GPT2_URL} ({type(error).__name__}): switch "
                        "the internet on, or use the encoding bytes.") from error
    if hashlib.sha256(answer.content).hexdigest() not in READERS:
        raise UserError(f"What was downloaded from {GPT2_URL} is not GPT-2's vocabulary: try again, or use the "
                        "encoding bytes.")
    return answer.content


# ---- documents to arrays ---------------------------------------------------------------------------------------------

def encode_documents(encoding, texts: list[str]) -> list[np.ndarray]:
    """The ids of every text as ordinary text, each followed by the separator once: a list of uint32 arrays."""
    cut = [bounded_pieces(valid_text(text)) for text in texts]
    ids = iter(encoding.encode_ordinary_batch([piece for pieces in cut for piece in pieces], num_threads=THREADS))
    return [np.array([i for _ in pieces for i in next(ids)] + [encoding.eot_token], dtype=np.uint32) for pieces in cut]


def valid_text(text: str) -> str:
    """The text itself, or with what UTF-8 cannot hold mended: surrogate pairs joined, lone ones replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def looks_special(text: str) -> bool:
    """Whether the text contains what a tokenizer could take for a special token, such as <|endoftext|>."""
    return SPECIAL_LOOKING.search(text) is not None


def bounded_pieces(text: str) -> list[str]:
    """The text in pieces none of which has 2 * LONGEST_RUN characters of space, or of non-space, in a row.

    A megabyte of spaces overflows tiktoken's stack and kills the whole run, one of a single letter takes older versions
    minutes. Ordinary text is one piece. Only blocks that are all space or all non-space are cut off, at fixed places:
    a run of twice a block's length covers at least one.
    """
    pieces, start = [], 0
    for block in range(0, len(text) - LONGEST_RUN + 1, LONGEST_RUN):
        if _is_one_run(text[block:block + LONGEST_RUN]):
            pieces += [text[start:block], text[block:block + LONGEST_RUN]]
            start = block + LONGEST_RUN
    return [piece for piece in pieces + [text[start:]] if piece]


def _is_one_run(block: str) -> bool:
    return block.isspace() or (block.split(None, 1) == [block])
