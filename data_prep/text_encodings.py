"""Text to token ids: `bytes` (needs nothing), `gpt2` (tiktoken, from a vocabulary file on this machine), another
encoding that tiktoken knows (cl100k_base, o200k_base, ...), or `auto`.

    encoding = get_encoding("auto")                 # gpt2 when its file can be had without network, else bytes
    arrays = encode_documents(encoding, ["one text", "another"])

Documents are ordinary text: `<|endoftext|>` inside one is thirteen characters, the separator is added by us.
"""
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from runtime import UserError
from vocabulary_files import (END_OF_TEXT, SHARED_FILES, VOCABULARY_FILES, as_tiktokens_cache, cache_name, gpt2_ranks,
                              verified_vocabulary)

SPECIAL_LOOKING = re.compile(r"<\|\w{1,40}\|>")
LONGEST_RUN = 2048          # characters without a change from space to non-space, see bounded_pieces
THREADS = min(32, os.cpu_count() or 1)

BYTES_PATTERN = r"(?s:.{1,100})"        # any split gives the same ids; short pieces are merged fastest
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def get_encoding(name: str, allow_download: bool = False):
    """A tiktoken.Encoding for "bytes", "gpt2", "auto" (it prints which) or another one that tiktoken knows.

    It has .n_vocab ids; .eot_token is the separator. Where tiktoken is not installed, "bytes" is a ByteEncoding with
    the same methods. Nothing is downloaded unless allow_download. Raises UserError for an unknown name, and when a
    vocabulary cannot be had: which files, where.
    """
    if name == "bytes":
        return bytes_encoding()
    if name == "gpt2":
        return gpt2_encoding(allow_download)
    if name == "auto":
        return _best_encoding(allow_download)
    tiktoken = _tiktoken()
    if tiktoken and name in tiktoken.list_encoding_names():
        return _other_encoding(tiktoken, name, allow_download)
    others = ", ".join(tiktoken.list_encoding_names()) if tiktoken else "with the package tiktoken others too"
    raise UserError(f"There is no encoding {name!r}: use bytes, gpt2 or auto ({others}).")


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
    return tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=gpt2_ranks(allow_download),
                             special_tokens={END_OF_TEXT: 50256}, explicit_n_vocab=50257)


# ---- tiktoken's other encodings --------------------------------------------------------------------------------------

def _other_encoding(tiktoken, name: str, allow_download: bool):
    file = SHARED_FILES.get(name, name)
    if content := verified_vocabulary(file):
        with as_tiktokens_cache(file, content):
            return tiktoken.get_encoding(name)
    if not allow_download:
        raise UserError(f"The vocabulary of {name} is not on this machine: put {file}.tiktoken (SHA-256 "
                        f"{VOCABULARY_FILES.get(file, 'unknown')[:8]}...) into the folder that TIKTOKEN_CACHE_DIR "
                        f"names, where tiktoken calls it {cache_name(file)}, into {Path.cwd()} or into a Kaggle "
                        "input, or allow the download.")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:      # requests' errors are OSErrors
        raise UserError(f"The vocabulary of {name} could not be downloaded ({type(error).__name__}): switch the "
                        "internet on, or use another encoding.") from error


# ---- documents to arrays ---------------------------------------------------------------------------------------------

CHUNK = 128 * 1024          # characters that a thread takes at a time


def encode_documents(encoding, texts: list[str]) -> list[np.ndarray]:
    """The ids of every text as ordinary text, each followed by the separator once: a list of uint32 arrays."""
    with ThreadPoolExecutor(THREADS) as pool:
        return [ids for part in start_encoding(pool, encoding, texts) for ids, _ in part.result()]


def start_encoding(pool: ThreadPoolExecutor, encoding, texts: list[str]) -> list[Future]:
    """Encode texts in the threads of a pool; each Future gives [(ids, whether it had endless runs), ...] in order.

    tiktoken lets go of Python's lock while it works, so that threads are enough, and texts are not copied to processes.
    """
    chunks, size = [[]], 0
    for text in texts:
        if size > CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(text)
        size += len(text)
    return [pool.submit(_encode_chunk, encoding, chunk) for chunk in chunks if chunk]


def _encode_chunk(encoding, texts: list[str]) -> list[tuple[np.ndarray, bool]]:
    encoded, end = [], np.array([encoding.eot_token], dtype=np.uint32)
    for text in texts:
        pieces = bounded_pieces(valid_text(text))
        encoded.append((np.concatenate([*(_ids(encoding, piece) for piece in pieces), end]), len(pieces) > 1))
    return encoded


def _ids(encoding, text: str) -> np.ndarray:
    """As encode_ordinary, without a list of a Python number a token: uint32."""
    if encoding.name == "bytes":
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
    if hasattr(encoding, "encode_to_numpy"):        # tiktoken 0.9
        return encoding.encode_to_numpy(text, disallowed_special=())
    return np.array(encoding.encode_ordinary(text), dtype=np.uint32)


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
