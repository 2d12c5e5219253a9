"""How fast text becomes shards, against tiktoken's own batch call on the same cores, and shards become batches.

    python bench/data_speed.py                          # a part of Python's standard library, a minute or two
    python bench/data_speed.py --corpus_gb 1            # that text written out a gigabyte long: its memory is the point

Preparation and tiktoken's `encode_ordinary_batch` take turns over the same text in one run, so that a busy machine
slows both; the ratio of each pair counts. The preparation reads files, encodes, counts byte pairs, hashes and writes;
tiktoken's call gets its texts in memory and gives lists. `resident` is the largest memory of a process that does
nothing but prepare. The loader cuts random windows out of the shards, as training does.
"""
import argparse
import contextlib
import datetime
import io
import os
import platform as machine
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for folder in ("py", "data_prep"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import prepare as prepare_module  # noqa: E402
import text_encodings  # noqa: E402
from runtime import available_cores, installed_version  # noqa: E402
from text_documents import read_documents  # noqa: E402
from text_sources import find_texts  # noqa: E402
from token_data import open_shards, train_batch  # noqa: E402

T, ROWS, BATCHES = 1024, 8, 4000


def seconds(work) -> tuple[float, float]:
    """Of the clock, and of all cores together."""
    start, start_cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        work()
    return time.perf_counter() - start, time.process_time() - start_cpu


def standard_library(size: int) -> list[str]:
    files, _, _ = find_texts(["stdlib"], max_bytes=size)
    return [document.text for file in files for document in read_documents(file, 0.1)]


def write_corpus(folder: Path, texts: list[str], size: int) -> None:
    """`size` bytes of the texts, over and over, as documents of about the length of a web page's."""
    content, written, number = "\n".join(texts).encode(), 0, 0
    folder.mkdir()
    while written < size:
        part = f"{number}\n".encode() + content[:size - written]
        (folder / f"{number:05d}.txt").write_bytes(part)        # cut in the middle of a letter at most at the end
        written, number = written + len(part), number + 1


def encode_all(encoding, texts: list[str], threads: int) -> None:
    """tiktoken's own call, on batches of the size of ours: all at once would hold every id as a Python number."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 4_000_000:
            encoding.encode_ordinary_batch(batch, num_threads=threads)
            batch, size = [], 0
    encoding.encode_ordinary_batch(batch, num_threads=threads)


def compare(folder: Path, pairs: int, size: int, encoding_name: str) -> None:
    write_corpus(folder / "text", standard_library(size), size)
    encoding, threads = text_encodings.get_encoding(encoding_name), available_cores()
    text_encodings.THREADS = threads
    megabytes = sum(path.stat().st_size for path in (folder / "text").iterdir()) / 1e6
    documents = [document.text for file in find_texts([folder / "text"])[0] for document in read_documents(file, 0.1)]
    print(f"preparation of {megabytes:.0f} MB, {len(documents):,} documents, {encoding_name}, {threads} threads\n"
          f"| pair | prepare MB/s | tiktoken MB/s | ratio | ratio of CPU time |\n|---|---|---|---|---|")
    ratios = []
    for pair in range(pairs):
        ours, cpu = seconds(lambda: prepare_module.prepare([folder / "text"], folder / f"out{pair}", encoding_name))
        theirs, their_cpu = seconds(lambda: encode_all(encoding, documents, threads))
        ratios.append((theirs / ours, their_cpu / cpu))
        print(f"| {pair + 1} | {megabytes / ours:.2f} | {megabytes / theirs:.2f} | {theirs / ours:.2f} | "
              f"{their_cpu / cpu:.2f} |", flush=True)
    median = [sorted(values)[len(values) // 2] for values in zip(*ratios)]
    print(f"median ratio {median[0]:.2f}, of CPU time {median[1]:.2f} (which other processes disturb less)\n")


def time_loader(folder: Path) -> None:
    train = open_shards(folder, T).train
    train_batch(train, 0, 0, ROWS, slice(None))
    elapsed, _ = seconds(lambda: [train_batch(train, 0, step, ROWS, slice(None)) for step in range(BATCHES)])
    print(f"loader, one process: {BATCHES * ROWS * T / elapsed / 1e6:.0f} million tokens/s ({BATCHES:,} batches of"
          f" {ROWS} windows of {T} tokens from {train.tokens:,}, in the page cache)\n")


def measure_memory(folder: Path, gigabytes: float, encoding_name: str) -> None:
    write_corpus(folder / "large", standard_library(sys.maxsize), int(gigabytes * 1e9))
    command = [sys.executable, prepare_module.__file__, str(folder / "large"), "--out", str(folder / "large-out"),
               "--encoding", encoding_name]
    elapsed, _ = seconds(lambda: subprocess.run(command, check=True, stdout=sys.__stderr__))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    print(f"preparation of {gigabytes:g} GB: {elapsed:.0f} s, {gigabytes * 1e3 / elapsed:.1f} MB/s, at most"
          f" {peak:.0f} MB resident\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=40, help="of text for each of a pair")
    parser.add_argument("--corpus_gb", type=float, default=0, help="measure the memory of preparing so much")
    parser.add_argument("--encoding", default="gpt2")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {machine.machine()} with {available_cores()} cores, load"
          f" {os.getloadavg()[0]:.1f}, tiktoken {installed_version('tiktoken')}\n")
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.pairs, int(options.megabytes * 1e6), options.encoding)
        time_loader(Path(folder) / "out0")
        if options.corpus_gb:
            measure_memory(Path(folder), options.corpus_gb, options.encoding)


if __name__ == "__main__":
    main()
