"""Text in, token shards out.

    python data_prep/prepare.py stdlib --out data/shards --encoding bytes   # Python's own source: needs no network
    python data_prep/prepare.py my_texts/ book.txt --out data/shards        # gpt2 if its vocabulary is here, else bytes
    python data_prep/prepare.py reviews.csv.gz --column review --out data/reviews
    python data_prep/prepare.py hf:HuggingFaceFW/fineweb-edu:sample-10BT --max-tokens 1000000000 --out data/edu

or, from a notebook:  prepare(["stdlib"], "data/shards", encoding="bytes")

Files are found (text_sources.py), read (text_records.py, text_documents.py), turned into token ids (text_encodings.py)
and written (preparation.py, shard_writer.py) as shards, which training reads (token_data.py). A killed preparation goes
on when it is started again. The manifest also holds a yardstick, byte_models.py.
"""
import argparse
import math
import re
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "py"))     # for runtime, token_data; no harm in a notebook

from foreign_shards import has_token_files
from preparation import Preparation, Progress
from runtime import UserError
from shard_writer import SHARD_TOKENS, already_prepared, check_disk, unfinished_folder, write_manifest
from text_documents import LONG_FILE, DocumentReader
from text_encodings import get_encoding
from text_records import TextFile
from text_sources import find_input, find_texts
from token_data import dtype_for
from vocabulary_files import folders_below


def prepare(sources, out, encoding: str = "auto", val_fraction: float = 0.1, max_bytes: int | None = None,
            shard_tokens: int = SHARD_TOKENS, allow_download: bool = False, column: str = "text",
            max_tokens: int | None = None) -> dict:
    """Make a folder of token shards from text and return its manifest.

    sources: files, folders, datasets and the word "stdlib", see text_sources.py.
    out: a new or empty folder; where the same request is already prepared, this returns at once, and where it was
    killed, this goes on.
    encoding: bytes, gpt2, another one that tiktoken knows, or auto.
    val_fraction: share of the documents that is held out, in (0, 1).
    max_bytes: stop at about this much text (up to a document more), a spread of all files.
    max_tokens: stop at the document that reaches this many tokens.
    column: that holds the text, in .jsonl, .csv, .parquet and datasets.
    Raises UserError, one sentence, and then has written nothing.
    """
    sources = [sources] if isinstance(sources, (str, Path)) else list(sources)
    _check_settings(sources, val_fraction, max_bytes, shard_tokens, max_tokens)
    files, skipped, text_hash = find_texts(sources, max_bytes, Progress("checked").say, column)
    encoder = get_encoding(encoding, allow_download)
    request = {"text": text_hash, "encoding": encoder.name, "val_fraction": val_fraction, "max_bytes": max_bytes,
               **({"max_tokens": max_tokens} if max_tokens else {}), **({"column": column} if column != "text" else {})}
    if ready := already_prepared(out, request):
        print(f"{out} is already prepared from this text")
        return ready
    check_disk(out, _disk_needed(files, max_bytes, max_tokens, encoder))
    unfinished = {**request, "shard_tokens": shard_tokens}
    with unfinished_folder(out, unfinished) as folder:
        reader = DocumentReader(files, val_fraction, column, max_bytes)
        fields = Preparation(folder, unfinished, reader, encoder, shard_tokens, max_tokens).run()
        _check_both_splits(fields["splits"], DocumentReader(files, val_fraction, column, max_bytes), val_fraction)
        manifest = write_manifest(folder, {"request": request, "sources": _describe_sources(files), "skipped": skipped,
                                           **fields})
    _print_summary(out, manifest)
    return manifest


def _check_settings(sources: list, val_fraction: float, max_bytes: int | None, shard_tokens: int,
                    max_tokens: int | None) -> None:
    if not sources:
        raise UserError("No text was named: give files, folders, or stdlib for Python's own source.")
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} leaves train or val empty: choose one such as 0.1.")
    for name, limit in (("max_bytes", max_bytes), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise UserError(f"{name}={limit} leaves no text: choose at least 1, or leave it out for all of it.")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens={shard_tokens} is no size of a shard: choose at least 1.")


def _disk_needed(files: list[TextFile], max_bytes: int | None, max_tokens: int | None, encoder) -> float:
    """Bytes of shards, from above for text: GPT-2 makes less than a token of two bytes. Tables may grow or shrink.

    How large a dataset on the hub is nobody knows before: the limits count alone.
    """
    known = sum(file.text_bytes or file.bytes for file in files) if all(file.bytes for file in files) else sys.maxsize
    total = min(known, max_bytes or sys.maxsize)
    tokens = min(total if encoder.name == "bytes" else total / 2, max_tokens or sys.maxsize)
    if tokens >= sys.maxsize / 2:
        return 1_000_000
    return 1.02 * tokens * np.dtype(dtype_for(encoder.n_vocab)).itemsize + 1_000_000


def _describe_sources(files: list[TextFile]) -> list[dict]:
    names = dict.fromkeys(file.source for file in files)
    groups = {name: [file.bytes for file in files if file.source == name] for name in names}
    return [{"source": name, "files": len(sizes), "bytes": sum(sizes)} for name, sizes in groups.items()]


def _check_both_splits(splits: dict, reader: DocumentReader, val_fraction: float) -> None:
    """Which documents are held out is decided by their hashes, so few documents may all fall on one side."""
    counts = {name: split["documents"] for name, split in splits.items()}
    if all(counts.values()):
        return
    if not any(counts.values()):
        raise UserError("No document was left of the text, all were damaged or empty: look into the files, or name "
                        "another column.")
    if sum(counts.values()) == 1:
        raise UserError("The text is a single document, which cannot be divided into train and val: give several "
                        f"files, or one of more than {LONG_FILE // 1024} KiB.")
    if not counts["train"]:
        raise UserError(f"All {counts['val']} documents were held out for val: choose a val_fraction below "
                        f"{val_fraction}.")
    least = math.ceil(1000 * min(document.least_share for document in reader)) / 1000
    raise UserError(f"None of {counts['train']} documents was held out for val: choose val_fraction={least} or more, "
                    "or give more text.")


# ---- what the user sees ----------------------------------------------------------------------------------------------

def _print_summary(out, manifest: dict) -> None:
    for name, split in manifest["splits"].items():
        print(f"{name:5} {split['tokens']:>14,} tokens {split['bytes']:>14,} bytes {split['documents']:>9,} documents "
              f"{len(split['shards']):>4} shards")
    losses = [f"{name} {manifest['reference'][f'{name}_nats_per_byte']:.3f}" for name in ("unigram", "bigram")]
    print(f"{out}: encoding {manifest['encoding']}, {manifest['vocab_size']:,} ids as {manifest['dtype']}; "
          f"byte models on val: {', '.join(losses)} nats per byte")
    if special := manifest["special_looking_documents"]:
        print(f"{special} documents contain special-looking text such as <|endoftext|>: encoded as ordinary text")
    if counts := manifest["damaged"]["counts"]:
        first = manifest["damaged"]["listed"][0]
        print(f"damaged documents: {'; '.join(f'{count:,} x {reason}' for reason, count in counts.items())}; listed in "
              f"manifest.json, such as {first['document']}")
    if skipped := manifest["skipped"]:
        file, reason = skipped[0].values()
        print(f"skipped {len(skipped)} files, listed in manifest.json, such as {file} ({reason})")


def find_or_prepare(data: str = "auto", encoding: str = "auto", small_model: bool = False, out: str | Path = "data",
                    inputs: str | Path = "/kaggle/input", column: str = "text") -> str:
    """The folder of token shards to train from, made here when there is none.

    data: a folder of shards, ours or those of nanoGPT, llm.c, build-nanogpt; a text file, folder or dataset; the name
    of a Kaggle input; "stdlib"; or "auto": the shards among the inputs, else stdlib.
    column: of tables, for their text.
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
    data = str(data) if str(data) == "stdlib" else str(find_input(data))
    if is_shard_manifest(Path(data) / "manifest.json") or has_token_files(data):
        print(f"token shards: {data}")
        return data
    name = get_encoding("bytes" if encoding == "auto" and small_model else encoding).name
    folder = Path(out) / f"{re.sub('[^a-zA-Z0-9._-]+', '-', Path(data).stem) or 'text'}-{name}"
    prepare([data], folder, name, column=column)
    return str(folder)


def is_shard_manifest(path: Path) -> bool:
    """Whether a manifest.json is that of token shards; other things have files of that name too."""
    return path.is_file() and b"gpt-token-shards" in path.read_bytes()


def main(arguments: list | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="files, folders, datasets (hf:owner/name:config), or stdlib")
    parser.add_argument("--out", required=True, help="the folder of shards to make")
    parser.add_argument("--encoding", default="auto", help="bytes, gpt2, cl100k_base, ... or auto (default)")
    parser.add_argument("--val-fraction", type=float, default=0.1, help="share of documents held out (default 0.1)")
    parser.add_argument("--max-bytes", type=int, help="stop at about this much text")
    parser.add_argument("--max-tokens", type=int, help="stop at the document that reaches this many tokens")
    parser.add_argument("--column", default="text", help="of .jsonl, .csv, .parquet and datasets (default text)")
    parser.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens in a shard file")
    parser.add_argument("--allow-download", action="store_true", help="fetch the vocabulary if it is not here")
    try:
        prepare(**vars(parser.parse_args(arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
