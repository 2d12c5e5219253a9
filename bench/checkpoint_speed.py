"""How long a save stops the training, how long it takes in all, and what memory it needs: the GPT-2 124M, by default.

    python bench/checkpoint_speed.py                        # part of `make bench`; 4 GB of memory, 6 GB of disk
    python bench/checkpoint_speed.py --preset demo --platform xla-cpu --folder /path/on/the/disk/to/measure

stop: until the training goes on, which is the comparison of the replicas, the room check, and the copy to the host.
written: until the checkpoint is on the disk, read back and verified, the best copy linked, old ones removed.
memory: the largest resident memory while saving, beyond that before it; one copy of the checkpoint is the least.
"""
import argparse
import datetime
import os
import platform as machine
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime as rt  # noqa: E402


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Samples the resident memory while its block runs; `.bytes` is the largest growth since the block began."""

    def __enter__(self):
        self.start, self.bytes, self.over = resident_bytes(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    def _watch(self):
        while not self.over.wait(0.01):
            self.bytes = max(self.bytes, resident_bytes() - self.start)


def measure(config, repeats: int, folder: Path) -> None:
    """In the worker: save the same state `repeats` times, as train_gpt's loop does; print a table."""
    import checkpoint as ckpt
    import train_gpt
    runtime = rt.Runtime(config.precision)
    model, optimizer = train_gpt.set_up(config, config.model(config.vocab_size or 384), runtime, None, None)
    shards = SimpleNamespace(manifest={"splits": {}}, vocab_size=config.vocab_size, reference=None,
                             bytes_per_token=lambda split: 1.0)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"\n{datetime.date.today()}, {machine.machine()} with {rt.available_cores()} cores, load"
          f" {os.getloadavg()[0]:.1f}, device {runtime.device_kind()} ({runtime.device.type}), torch"
          f" {rt.installed_version('torch')}\n{parameters:,} parameters,"
          f" {ckpt.size_text(ckpt.BYTES_PER_PARAMETER * parameters)} a checkpoint, in {folder}\n\n"
          "| save | stop, s | written, s | GB/s | memory, GB |\n|---|---|---|---|---|", flush=True)
    for number in range(1, repeats + 1):
        with PeakMemory() as memory, ckpt.Writer() as writer:
            begun = time.monotonic()
            train_gpt.save(config, runtime, writer, model, optimizer, shards, number, None, True)
            stop = time.monotonic() - begun
            train_gpt.finish_saving(config, runtime, writer)
            written = time.monotonic() - begun
        rate = ckpt.BYTES_PER_PARAMETER * parameters / written / 1e9
        print(f"| {number} | {stop:.2f} | {written:.2f} | {rate:.2f} | {memory.bytes / 1e9:.2f} |", flush=True)


def main(arguments: list | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", default="", help="on the disk to measure; a temporary folder when left out")
    options = parser.parse_args(arguments)
    platform = rt.patch_environment(options.platform)
    import train_gpt
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_speed_", dir=options.folder or None))
    try:
        config = train_gpt.make_config(options.preset, run_folder=str(folder), platform=options.platform)
        rt.launch(measure, (config, options.repeats, folder), platform, 0 if platform.uses_xla else 1)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    rt.run_main(main)
