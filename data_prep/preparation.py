"""The work between documents and shards: encode in all cores, write, note how far it is, go on after a kill.

    with unfinished_folder(out, request) as folder:
        fields = Preparation(folder, request, DocumentReader(files, 0.1), encoder).run()    # the manifest's

The documents come in a fixed order and progress is noted between two of them, so a preparation that was killed and went
on ends with the same bytes as an unbroken one. While a batch is written the next one is read and encoded: at most
AHEAD + 1 batches are in memory, however large the text is.
"""
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator

import numpy as np

from byte_models import COUNTED_BYTES, byte_models, count_byte_pairs
from shard_writer import SHARD_TOKENS, SplitWriter, save_progress, saved_progress
from text_documents import Damage, Document, DocumentReader
from text_encodings import THREADS, looks_special, start_encoding
from token_data import dtype_for

BATCH_CHARACTERS = 4_000_000    # encoded at a time: enough to keep all threads busy, little memory
AHEAD = 1                       # batches that are encoded while one is written
NOTE_EVERY = 10.0               # seconds between notes of the progress: what a kill costs at most


class Preparation:
    """Reads, encodes and writes all documents of `reader`, from the progress in `folder` on where there is some.

    max_tokens: stop at the document that reaches this many, train and val together.
    """

    def __init__(self, folder: Path, request: dict, reader: DocumentReader, encoder, shard_tokens: int = SHARD_TOKENS,
                 max_tokens: int | None = None):
        self.folder, self.request, self.reader, self.encoder = folder, request, reader, encoder
        self.max_tokens = max_tokens
        self.writers = {name: SplitWriter(folder, name, encoder.n_vocab, shard_tokens) for name in ("train", "val")}
        self.pairs = {name: np.zeros((257, 257), dtype=np.int64) for name in self.writers}
        self.damage, self.special = Damage(), 0
        self.progress, self.noted = Progress("prepared"), time.monotonic()
        if noted := saved_progress(folder, request):
            self._go_on_from(noted)

    def run(self) -> dict:
        """The manifest's fields about tokens."""
        for documents, place, encoded in self._encoded_batches():
            encoded = self._within_budget(encoded)
            self._write(documents[:len(encoded)], encoded)
            if len(encoded) < len(documents) or self._room() <= 0:
                break
            if time.monotonic() - self.noted > NOTE_EVERY:
                self._note(place)
            self.progress.say(*self._done())
        return {"dtype": dtype_for(self.encoder.n_vocab), "vocab_size": self.encoder.n_vocab,
                "separator": self.encoder.eot_token, "encoding": self.encoder.name,
                "special_looking_documents": self.special, "damaged": self.reader.damage.with_those_of(self.damage),
                "splits": {name: writer.finish() for name, writer in self.writers.items()},
                "reference": byte_models(self.pairs["train"], self.pairs["val"])}

    def _encoded_batches(self) -> Iterator[tuple[list[Document], dict, list]]:
        """(documents, where the reader was after them, [(ids, had endless runs), ...])"""
        waiting = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for documents, place in _batches(self.reader):
                parts = start_encoding(pool, self.encoder, [document.text for document in documents])
                waiting.append((documents, place, parts))
                if len(waiting) > AHEAD:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())

    def _room(self) -> int:
        """Tokens that may still come."""
        if not self.max_tokens:
            return sys.maxsize
        return self.max_tokens - sum(writer.tokens for writer in self.writers.values())

    def _within_budget(self, encoded: list) -> list:
        """The first documents up to the one that reaches max_tokens."""
        tokens = np.cumsum([len(ids) for ids, _ in encoded])
        return encoded[:int(np.searchsorted(tokens, self._room())) + 1]

    def _write(self, documents: list[Document], encoded: list) -> None:
        for name, writer in self.writers.items():
            chosen = [i for i, document in enumerate(documents) if document.split == name]
            if chosen:
                content = [documents[i].text.encode() for i in chosen]
                if writer.bytes < COUNTED_BYTES:
                    self.pairs[name] += count_byte_pairs(content)
                writer.add(np.concatenate([encoded[i][0] for i in chosen]), sum(map(len, content)), len(chosen))
        for document, (_, had_runs) in zip(documents, encoded):
            self.special += looks_special(document.text)
            if had_runs:
                self.damage.add(document.where, "endless run, encoded in parts")

    def _note(self, place: dict) -> None:
        self.noted = time.monotonic()
        save_progress(self.folder, self.request, {
            "place": place, "writers": {name: writer.state() for name, writer in self.writers.items()},
            "pairs": {name: pairs.tolist() for name, pairs in self.pairs.items()},
            "damage": self.damage.state(), "special": self.special})

    def _go_on_from(self, noted: dict) -> None:
        for name, writer in self.writers.items():
            writer.restore(noted["writers"][name])
            self.pairs[name] = np.array(noted["pairs"][name], dtype=np.int64)
        self.damage, self.special = Damage(**noted["damage"]), noted["special"]
        self.reader.go_to(noted["place"])
        tokens = sum(writer.tokens for writer in self.writers.values())
        self.progress.first = self._done()[0]
        print(f"going on where a preparation of the same text was ended, after {tokens:,} tokens", flush=True)

    def _done(self) -> tuple[int, int, str]:
        """Done and to do, for the progress, and the name of a million of them."""
        if self.max_tokens:
            return self.max_tokens - self._room(), self.max_tokens, "M tokens"
        return *self.reader.done(), "MB"


def _batches(reader: DocumentReader) -> Iterator[tuple[list[Document], dict]]:
    batch, size = [], 0
    for document in reader:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch, reader.place()
            batch, size = [], 0
    if batch:
        yield batch, reader.place()


def _finished(documents: list[Document], place: dict, parts: list) -> tuple[list[Document], dict, list]:
    return documents, place, [one for part in parts for one in part.result()]


class Progress:
    """A bar with rate and time left: on a terminal one line that is written anew, elsewhere a line now and then."""
    WIDTH = 20

    def __init__(self, what: str):
        self.what, self.start, self.first = what, time.monotonic(), 0       # first: what had been done before
        self.said = self.start

    def say(self, done: int, total: int, unit: str = "MB") -> None:
        """done and total are in bytes or tokens; unit is the name of a million of them. Total 0: nobody knows."""
        now = time.monotonic()
        if now - self.said < self._wait(now):
            return
        rate, share = (done - self.first) / (now - self.start), min(1.0, done / total) if total else 0.0
        self.said, left = now, int(max(0, total - done) / max(rate, 1))
        bar = "#" * int(share * self.WIDTH)
        line = (f"{self.what} [{bar:-<{self.WIDTH}}] {share:.0%} {done / 1e6:,.0f} of {total / 1e6:,.0f} {unit}, "
                f"{rate / 1e6:,.1f} {unit}/s, {left // 60} min {left % 60} s left" if total else
                f"{self.what} {done / 1e6:,.0f} {unit}, {rate / 1e6:,.1f} {unit}/s")
        print(f"\r{line}   " if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)

    def _wait(self, now: float) -> float:
        """Seconds between two lines; the longer it takes, the more of them, so that logs stay short."""
        return 0.5 if sys.stdout.isatty() else min(30.0, max(3.0, (now - self.start) / 20))
