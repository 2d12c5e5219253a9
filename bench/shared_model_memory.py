"""Host memory of N processes that fine-tune BERT-base: the model built once and shared by fork, or built in each.

    python bench/shared_model_memory.py                     # 110 million parameters, 4 processes
    python bench/shared_model_memory.py --processes 8 --layers 12

Each process gets its model ready, up to the moment in which it would move to the device, and waits for the others. Meanwhile
the proportional memory (Pss: a shared page counts once) of this process and all its children is sampled. The weights are
random: their size is what matters here. Linux only.
"""
import argparse
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime as rt

rt.set_thread_variables()


def build(layers: int):
    """BERT-base's geometry with random weights."""
    from transformers import BertConfig, BertForSequenceClassification
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, num_labels=2))


def worker(layers: int, model=None) -> None:
    runtime = rt.Runtime()
    model = model or build(layers)
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())    # every page is touched
    runtime.all_reduce(runtime.number(total))
    time.sleep(1)


def family(pid: int) -> list:
    """This process and everything it started."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()]
    return [pid, *(one for child in children for one in family(child))]


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Peak:
    """The largest sum of Pss over the family, sampled in a thread while the context is open."""

    def __enter__(self):
        self.bytes, self.ended = 0, threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def sample(self):
        import os
        while not self.ended.wait(0.05):
            try:
                self.bytes = max(self.bytes, sum(map(pss_bytes, family(os.getpid()))))
            except (OSError, StopIteration):        # one of them has just ended
                continue


def measure(processes: int, layers: int) -> dict:
    """Peak bytes {'built in each': ..., 'shared': ...}."""
    platform, peaks = rt.Platform("cpu", 1, "memory"), {}
    with Peak() as peak:
        rt.launch(worker, (layers,), platform, processes)
    peaks["built in each"] = peak.bytes
    model = build(layers)
    with Peak() as peak:
        rt.launch(worker, (layers, model), platform, processes)
    peaks["shared"] = peak.bytes
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    rt.patch_environment("cpu")
    import transformers  # noqa: F401  what both ways need is there before either is measured
    for name, size in measure(options.processes, options.layers).items():
        print(f"{options.processes} processes, the model {name}: peak {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
