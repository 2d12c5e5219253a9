"""What is in a folder of token shards: look before you train.

    python data_prep/inspect_shards.py data/shards
    python data_prep/inspect_shards.py /kaggle/input/edufineweb10b --samples 10 --picture lengths.png

Prints counts, the lengths of documents, how many are there twice (within a split, or in train and val both, which makes
the validation loss too good), the share of characters that are no text, and the decoded beginnings of some documents.
Draws a histogram of the lengths. Shards of our own, of nanoGPT, llm.c and build-nanogpt are all read.
"""
import argparse
import hashlib
import sys
import unicodedata
from array import array
from pathlib import Path
from typing import Iterator

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "py"))

from preparation import Progress
from runtime import UserError
from text_encodings import get_encoding
from token_data import ShardMap, read_manifest, stored_dtype

BLOCK = 4_000_000           # tokens looked at at a time
LONGEST = 20_000_000        # tokens: files without separators are cut into documents of this length
DECODED_TOKENS = 2000       # of each document in the sample
NO_TEXT = {"Cc", "Cn", "Co", "Cs"}      # Unicode's control, unassigned, private and surrogate characters


class Split:
    """What one pass over a split finds: lengths and hashes of all documents, and some of the documents."""

    def __init__(self, folder: Path, manifest: dict, name: str, sample: int, progress: Progress):
        self.name, self.entry = name, manifest["splits"][name]
        self.lengths, self.hashes, self.sample = array("q"), array("Q"), []
        self.tokens = self.entry["tokens"]
        wanted = iter(range(0, max(1, self.tokens), max(1, self.tokens // sample)))
        next_wanted, done = next(wanted), 0
        for ids in documents(folder, manifest, name):
            self.lengths.append(len(ids))
            self.hashes.append(int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "big"))
            if done >= next_wanted and len(self.sample) < sample:
                self.sample.append((len(self.lengths), ids[:DECODED_TOKENS].tolist(), len(ids)))
                next_wanted = next(wanted, sys.maxsize)
            done += len(ids) + 1
            progress.say(done, self.tokens, "M tokens")

    def duplicates(self) -> int:
        """Documents beyond the first of their text."""
        return len(self.hashes) - len(set(self.hashes))

    def row(self) -> list[str]:
        lengths = np.array(self.lengths, dtype=np.int64) if len(self.lengths) else np.zeros(1, dtype=np.int64)
        text_bytes = self.entry["bytes"]
        return [self.name, f"{self.tokens:,}", str(len(self.entry["shards"])), f"{len(self.lengths):,}",
                f"{lengths.min():,}", f"{int(np.median(lengths)):,}", f"{lengths.max():,}",
                f"{text_bytes / self.tokens:.2f}" if text_bytes else "unknown", f"{self.duplicates():,}"]


HEADINGS = ("split", "tokens", "shards", "documents", "shortest", "median", "longest", "bytes a token", "copies")


def documents(folder: Path, manifest: dict, name: str) -> Iterator[np.ndarray]:
    """The documents of a split without their separators: arrays of ids. They run over the ends of shards."""
    separator, open_end = manifest["separator"], []
    for shard in manifest["splits"][name]["shards"]:
        if not shard["tokens"]:
            continue
        mapped = ShardMap(folder / shard["file"], stored_dtype(manifest, shard), shard.get("offset", 0),
                          shard["tokens"])
        for first in range(0, shard["tokens"], BLOCK):
            block = np.array(mapped.ids[first:first + BLOCK])
            mapped.release()
            ends = np.flatnonzero(block == separator) if separator is not None else []
            for start, end in zip([0, *(end + 1 for end in ends)], ends):
                yield from _whole(open_end + [block[start:end]])
                open_end = []
            open_end.append(block[ends[-1] + 1:] if len(ends) else block)
            if sum(map(len, open_end)) >= LONGEST:
                yield from _whole(open_end)
                open_end = []
    yield from _whole(open_end)


def _whole(parts: list[np.ndarray]) -> list[np.ndarray]:
    """One document, or none: some put the separator before each document, so that the first one is empty."""
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)
    return [ids.astype(np.uint32)] if len(ids) else []


def inspect(folder, samples: int = 5, picture: str | Path | None = None) -> dict[str, Split]:
    """Print what is in a shard folder, draw the lengths, and return what was found, by split.

    picture: where the histogram goes; None: <name of the folder>-lengths.png here. Raises UserError as read_manifest.
    """
    folder = Path(folder)
    manifest, progress = read_manifest(folder), Progress("inspected")
    splits = {name: Split(folder, manifest, name, max(samples, 200), progress) for name in ("train", "val")}
    separator = "unknown" if manifest["separator"] is None else manifest["separator"]
    print(f"{folder}: encoding {manifest['encoding']}, {manifest['vocab_size']:,} ids as {manifest['dtype']}, "
          f"separator {separator}\n")
    print_table([HEADINGS, *(split.row() for split in splits.values())])
    shared = len(set(splits["train"].hashes) & set(splits["val"].hashes))
    print(f"\ndocuments of val that are also in train: {shared:,}"
          + (" (the validation loss is too good by that)" if shared else ""))
    for count, what in ((manifest.get("special_looking_documents"), "documents with special-looking text"),
                        (sum(manifest.get("damaged", {}).get("counts", {}).values()), "damaged when prepared")):
        if count:
            print(f"{what}: {count:,}")
    show_samples(splits, _decoder(manifest["encoding"]), samples)
    picture = Path(picture or f"{folder.resolve().name}-lengths.png")
    draw_lengths(splits, picture)
    print(f"lengths of documents: {picture}")
    return splits


def print_table(rows: list) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(value.rjust(width) for value, width in zip(row, widths)))


def _decoder(encoding: str):
    try:
        return get_encoding(encoding).decode
    except UserError as error:
        print(f"documents are shown as token ids: {error}")
        return None


def show_samples(splits: dict[str, Split], decode, samples: int) -> None:
    """The share of characters that are no text, in the whole sample, and the beginnings of `samples` a split."""
    if decode:
        texts = [decode(ids) for split in splits.values() for _, ids, _ in split.sample]
        print(f"characters that are no text (control, unassigned, private, undecodable): {no_text_share(texts):.3%} "
              f"in a sample of {len(texts)} documents")
    for name, split in splits.items():
        for number, ids, length in split.sample[::max(1, len(split.sample) // max(1, samples))][:samples]:
            beginning = repr(decode(ids)[:120]) if decode else str(ids[:20])
            print(f"\n{name}, document {number:,}, {length:,} tokens\n  {beginning}")


def no_text_share(texts: list[str]) -> float:
    """Characters that are no text, of all; a character cut off at the end of a sample does not count."""
    characters = "".join(text.rstrip("\ufffd") for text in texts)
    strange = sum(character == "\ufffd" or character not in "\n\r\t\f" and unicodedata.category(character) in NO_TEXT
                  for character in characters)
    return strange / max(1, len(characters))


def draw_lengths(splits: dict[str, Split], picture: Path) -> None:
    """Share of the documents over their length in tokens, both splits, logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    everything = [length for split in splits.values() for length in (split.lengths or [1])]
    edges = np.unique(np.geomspace(min(everything), max(everything) + 1, 40).astype(np.int64))
    for name, split in splits.items():
        if len(split.lengths):
            lengths = np.array(split.lengths)
            axes.hist(lengths, edges, weights=np.full(len(lengths), 100 / len(lengths)), histtype="step", linewidth=1.5,
                      label=f"{name}: {len(lengths):,} documents, median {int(np.median(lengths)):,} tokens")
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="% of the documents", title="Lengths of documents")
    axes.legend()
    FigureCanvasAgg(figure).print_png(str(picture))


def main(arguments: list | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder of token shards")
    parser.add_argument("--samples", type=int, default=5, help="documents of each split to show (default 5)")
    parser.add_argument("--picture", help="where the histogram goes (default: <name>-lengths.png here)")
    try:
        inspect(**vars(parser.parse_args(arguments)))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
