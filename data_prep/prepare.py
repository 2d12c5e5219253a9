"""Text in, token shards out.

    python data_prep/prepare.py stdlib --out data/shards --encoding bytes   # Python's own source: needs no network
    python data_prep/prepare.py my_texts/ book.txt --out data/shards        # gpt2 if its vocabulary is here, else bytes

or, from a notebook:  prepare(["stdlib"], "data/shards", encoding="bytes")

Files become documents (text_sources.py), documents token ids (text_encodings.py), ids shards (shard_writer.py), which
training reads (token_data.py). The manifest also holds a yardstick: what a unigram and a bigram model of bytes, fitted
on train, reach on val, in nats per byte. A GPT that does not beat the bigrams has learned next to nothing.
"""
import argparse
import math
import sys
import time
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "py"))     # for runtime, token_data; no harm in a notebook

from foreign_shards import has_token_files
from runtime import UserError
from shard_writer import SHARD_TOKENS, SplitWriter, already_prepared, check_disk, unfinished_folder, write_manifest
from text_encodings import encode_documents, folders_below, get_encoding, looks_special, valid_text
from text_sources import LONG_FILE, Document, TextFile, find_texts, read_documents
from token_data import dtype_for

BATCH_BYTES = 4_000_000         # text encoded at a time: enough to keep all threads busy, little memory
SAY_EVERY = 3.0                 # seconds between progress lines


def prepare(sources, out, encoding: str = "auto", val_fraction: float = 0.1, max_bytes: int | None = None,
            shard_tokens: int = SHARD_TOKENS, allow_download: bool = False) -> dict:
    """Make a folder of token shards from text and return its manifest.

    sources: files, folders and the word "stdlib".
    out: a new or empty folder; where the same request is already prepared, this returns at once.
    encoding: bytes, gpt2 or auto.      val_fraction: share of the documents that is held out, in (0, 1).
    max_bytes: stop at about this much text (up to a document more), a spread of all files.
    Raises UserError, one sentence, and then has written nothing.
    """
    sources = [sources] if isinstance(sources, (str, Path)) else list(sources)
    _check_settings(sources, val_fraction, max_bytes, shard_tokens)
    files, skipped, text_hash = find_texts(sources, max_bytes, Progress("checked").say)
    encoder = get_encoding(encoding, allow_download)
    request = {"text": text_hash, "encoding": encoder.name, "val_fraction": val_fraction, "max_bytes": max_bytes}
    if ready := already_prepared(out, request):
        print(f"{out} is already prepared from this text")
        return ready
    total = min(sum(file.bytes for file in files), max_bytes or sys.maxsize)
    check_disk(out, _disk_needed(total, encoder))
    with unfinished_folder(out) as folder:
        manifest = {"request": request, "sources": _describe_sources(files), "skipped": skipped,
                    **_write_splits(folder, _documents(files, val_fraction, max_bytes), encoder, shard_tokens, total)}
        _check_both_splits(manifest["splits"], _documents(files, val_fraction, max_bytes), val_fraction)
        manifest = write_manifest(folder, manifest)
    _print_summary(out, manifest)
    return manifest


def _check_settings(sources: list, val_fraction: float, max_bytes: int | None, shard_tokens: int) -> None:
    if not sources:
        raise UserError("No text was named: give files, folders, or stdlib for Python's own source.")
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} leaves train or val empty: choose one such as 0.1.")
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"max_bytes={max_bytes} leaves no text: choose at least 1, or leave it out for all of it.")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens={shard_tokens} is no size of a shard: choose at least 1.")


def _disk_needed(text_bytes: int, encoder) -> float:
    """Bytes of shards, from above: GPT-2 makes less than a token of two bytes of text."""
    tokens = text_bytes if encoder.name == "bytes" else text_bytes / 2
    return 1.02 * tokens * np.dtype(dtype_for(encoder.n_vocab)).itemsize + 1_000_000


def _describe_sources(files: list[TextFile]) -> list[dict]:
    names = dict.fromkeys(file.source for file in files)
    groups = {name: [file.bytes for file in files if file.source == name] for name in names}
    return [{"source": name, "files": len(sizes), "bytes": sum(sizes)} for name, sizes in groups.items()]


def _documents(files: list[TextFile], val_fraction: float, max_bytes: int | None) -> Iterator[Document]:
    taken = 0
    for file in files:
        for document in read_documents(file, val_fraction):
            yield document
            taken += len(document.text.encode("utf-8", "replace"))
            if max_bytes and taken >= max_bytes:
                return


def _write_splits(folder: Path, documents: Iterable[Document], encoder, shard_tokens: int, total: int) -> dict:
    """Encode and write all documents; the manifest's fields about tokens. total: bytes to come, for the progress."""
    writers = {name: SplitWriter(folder, name, encoder.n_vocab, shard_tokens) for name in ("train", "val")}
    pairs = {name: np.zeros((257, 257), dtype=np.int64) for name in writers}
    progress, special = Progress("prepared"), 0
    for batch in _batches(documents):
        special += sum(looks_special(document.text) for document in batch)
        for name, writer in writers.items():
            texts = [valid_text(document.text) for document in batch if document.split == name]
            if texts:
                content = [text.encode() for text in texts]
                pairs[name] += count_byte_pairs(content)
                writer.add(np.concatenate(encode_documents(encoder, texts)), sum(map(len, content)), len(texts))
        progress.say(sum(writer.bytes for writer in writers.values()), total)
    return {"dtype": dtype_for(encoder.n_vocab), "vocab_size": encoder.n_vocab, "separator": encoder.eot_token,
            "encoding": encoder.name, "special_looking_documents": special,
            "splits": {name: writer.finish() for name, writer in writers.items()},
            "reference": byte_models(pairs["train"], pairs["val"], writers["val"].bytes)}


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_both_splits(splits: dict, documents: Iterable[Document], val_fraction: float) -> None:
    """Which documents are held out is decided by their hashes, so few documents may all fall on one side."""
    counts = {name: split["documents"] for name, split in splits.items()}
    if all(counts.values()):
        return
    if sum(counts.values()) == 1:
        raise UserError("The text is a single document, which cannot be divided into train and val: give several "
                        f"files, or one of more than {LONG_FILE // 1024} KiB.")
    if not counts["train"]:
        raise UserError(f"All {counts['val']} documents were held out for val: choose a val_fraction below "
                        f"{val_fraction}.")
    least = math.ceil(1000 * min(document.least_share for document in documents)) / 1000
    raise UserError(f"None of {counts['train']} documents was held out for val: choose val_fraction={least} or more, "
                    "or give more text.")


# ---- the yardstick ---------------------------------------------------------------------------------------------------

def count_byte_pairs(documents: list[bytes]) -> np.ndarray:
    """How often which symbol follows which: int64 (257, 257), [before, after]. Symbol 256 ends each document."""
    end = np.array([256], dtype=np.int64)
    texts = (np.frombuffer(text, dtype=np.uint8) for text in documents)
    symbols = np.concatenate([end] + [part for text in texts for part in (text, end)])
    return np.bincount(symbols[:-1] * 257 + symbols[1:], minlength=257 * 257).reshape(257, 257)


def byte_models(train: np.ndarray, val: np.ndarray, val_bytes: int) -> dict:
    """Loss on val of two models fitted on train (add-one smoothing), from both splits' pair counts, in nats per byte.

    The cost of the separators counts, as it does in a GPT's loss, and is spread over the bytes of the text.
    """
    unigram = -np.log((train.sum(0) + 1) / (train.sum() + 257))
    bigram = -np.log((train + 1) / (train.sum(1, keepdims=True) + 257))
    return {"unigram_nats_per_byte": float((val.sum(0) * unigram).sum() / max(1, val_bytes)),
            "bigram_nats_per_byte": float((val * bigram).sum() / max(1, val_bytes))}


# ---- what the user sees ----------------------------------------------------------------------------------------------

class Progress:
    """Prints done, rate and time left, at most every SAY_EVERY seconds."""

    def __init__(self, what: str):
        self.what, self.start = what, time.monotonic()
        self.said = self.start

    def say(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.said < SAY_EVERY:
            return
        self.said, rate = now, done / (now - self.start)
        left = int(max(0, total - done) / max(rate, 1))
        print(f"{self.what} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s, "
              f"{left // 60} min {left % 60} s left", flush=True)


def _print_summary(out, manifest: dict) -> None:
    for name, split in manifest["splits"].items():
        print(f"{name:5} {split['tokens']:>14,} tokens {split['bytes']:>14,} bytes {split['documents']:>9,} documents "
              f"{len(split['shards']):>4} shards")
    losses = [f"{name} {manifest['reference'][f'{name}_nats_per_byte']:.3f}" for name in ("unigram", "bigram")]
    print(f"{out}: encoding {manifest['encoding']}, {manifest['vocab_size']:,} ids as {manifest['dtype']}; "
          f"byte models on val: {', '.join(losses)} nats per byte")
    if special := manifest["special_looking_documents"]:
        print(f"{special} documents contain special-looking text such as <|endoftext|>: encoded as ordinary text")
    if skipped := manifest["skipped"]:
        file, reason = skipped[0].values()
        print(f"skipped {len(skipped)} files, listed in manifest.json, such as {file} ({reason})")


def find_or_prepare(data: str = "auto", encoding: str = "auto", small_model: bool = False, out: str | Path = "data",
                    inputs: str | Path = "/kaggle/input") -> str:
    """The folder of token shards to train from, made here when there is none.

    data: a folder of shards, ours or those of nanoGPT, llm.c, build-nanogpt; a text file or folder; "stdlib"; or
    "auto": the shards among the inputs, else stdlib.
    encoding: for text; "auto" means bytes for a small model, whose embedding would be mostly vocabulary otherwise.
    Text is prepared once into `out`/<its name>. Raises UserError when several inputs hold shards, and as prepare does.
    """
    if data == "auto":
        found = sorted(str(folder) for folder in folders_below(Path(inputs))
                       if is_shard_manifest(folder / "manifest.json") or has_token_files(folder, look=True))
        if len(found) > 1:
            raise UserError(f"Several inputs hold token shards: {', '.join(found)}; name one of them as DATA.")
        if not found:
            print("no token shards among the inputs: reading Python's own standard library, a small corpus that shows"
                  " that everything works; attach shards of your own for a real run")
        data = found[0] if found else "stdlib"
    if is_shard_manifest(Path(data) / "manifest.json") or has_token_files(data):
        print(f"token shards: {data}")
        return str(data)
    name = get_encoding("bytes" if encoding == "auto" and small_model else encoding).name
    folder = Path(out) / f"{Path(data).stem or 'text'}-{name}"
    prepare([data], folder, name)
    return str(folder)


def is_shard_manifest(path: Path) -> bool:
    """Whether a manifest.json is that of token shards; other things have files of that name too."""
    return path.is_file() and b"gpt-token-shards" in path.read_bytes()


def main(arguments: list | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="files, folders, or stdlib")
    parser.add_argument("--out", required=True, help="the folder of shards to make")
    parser.add_argument("--encoding", default="auto", help="bytes, gpt2 or auto (default)")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="share of documents held out (default 0.1)")
    parser.add_argument("--max-bytes", type=int, help="stop at about this much text")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard file")
    parser.add_argument("--allow-download", action="store_true", help="fetch GPT-2's vocabulary if it is not here")
    try:
        prepare(**vars(parser.parse_args(arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
