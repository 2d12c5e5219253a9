"""The vocabularies of tiktoken's encodings, from files on this machine: found, verified by SHA-256, never touched.

    ranks = gpt2_ranks()                        # from any of the three files in which GPT-2's is published
    content = verified_vocabulary("cl100k_base")

tiktoken looks for its vocabulary under a hashed name, deletes a file whose content differs, and downloads. Here a file
is looked for by several names in several places, Kaggle's inputs among them, and nothing is downloaded unless allowed.
"""
import base64
import contextlib
import hashlib
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Iterator

from runtime import UserError

END_OF_TEXT = "<|endoftext|>"
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"    # the same ranks as gpt2


# ---- gpt2 ------------------------------------------------------------------------------------------------------------

def gpt2_ranks(allow_download: bool = False) -> dict[bytes, int]:
    """GPT-2's tokens and their ids. Raises UserError, which says which files may lie where, when it cannot be had."""
    found, rejected = find_gpt2_vocabulary()
    if found is None and allow_download:
        found = _download_vocabulary()
    if found is None:
        raise UserError(_how_to_get_vocabulary(rejected))
    return READERS[hashlib.sha256(found).hexdigest()](found)


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


# ---- tiktoken's other encodings --------------------------------------------------------------------------------------

# SHA-256 of the files that tiktoken_ext/openai_public.py names; two encodings share the file of another
VOCABULARY_FILES = {
    "r50k_base": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    "p50k_base": "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069",
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
SHARED_FILES = {"p50k_edit": "p50k_base", "o200k_harmony": "o200k_base"}
LARGEST_VOCABULARY = 2 ** 23


def cache_name(file: str) -> str:
    """tiktoken's: SHA-1 of the address."""
    return hashlib.sha1(GPT2_URL.replace("r50k_base", file).encode()).hexdigest()


def verified_vocabulary(file: str) -> bytes | None:
    """The content of a vocabulary file of any name in the usual places, by its SHA-256."""
    for folder in [*_vocabulary_folders(), *folders_below(INPUTS)]:
        for path in [folder / cache_name(file), *sorted(folder.glob("*.tiktoken")), *sorted(folder.glob("*.bpe"))]:
            with contextlib.suppress(OSError):
                content = path.read_bytes() if path.stat().st_size < LARGEST_VOCABULARY else b""
                if hashlib.sha256(content).hexdigest() == VOCABULARY_FILES.get(file):
                    return content
    return None


@contextlib.contextmanager
def as_tiktokens_cache(file: str, content: bytes) -> Iterator[None]:
    """A verified file where tiktoken looks, for as long as it looks: a folder of ours, so that nobody's is touched."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, cache_name(file)).write_bytes(content)
        os.environ["TIKTOKEN_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TIKTOKEN_CACHE_DIR"]
            if before is not None:
                os.environ["TIKTOKEN_CACHE_DIR"] = before
