"""Tokens a second of the demo preset on this CPU: train_gpt's whole loop against a bare PyTorch loop of the same model.

    python bench/cpu_speed.py           # two to three minutes on two cores; run nothing beside it

Both take the same batches of the same model, fp32, AdamW and clipping. The bare loop has no accumulation, no log, no
checks and no checkpoints. They alternate in one run, so a slower minute of the machine hits both; the figure is the ratio.
"""
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("py", "data_prep")]

import runtime as rt

rt.set_thread_variables()
PLATFORM = rt.patch_environment("cpu")

import torch

import token_data
import train_gpt
from optimizer import decay_groups
from prepare import prepare

STEPS, ROUNDS, SKIPPED = 60, 4, 20


def bare_loop(config) -> float:
    """Tokens a second of the plainest loop, in a process of its own: its threads would not survive the next fork."""
    rate = multiprocessing.get_context("fork").Value("d")
    rt.run_child(train_bare, (config, rate))
    return rate.value


def train_bare(config, rate) -> None:
    torch.set_num_threads(rt.available_cores())     # as train_gpt sets it
    shards = token_data.open_shards(config.data_folder, config.T, None)
    model = train_gpt.build_model(config, train_gpt.geometry_for(config, shards)).train()
    optimizer = torch.optim.AdamW(decay_groups(model, config.weight_decay), lr=1e-3, betas=(config.beta1, config.beta2))
    for step in range(STEPS):
        if step == SKIPPED:
            begun = time.perf_counter()
        x, y = (torch.from_numpy(part) for part in token_data.train_batch(
            shards.train, config.seed, step, config.global_batch, range(config.global_batch)))
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
    rate.value = (STEPS - SKIPPED) * config.tokens_per_step / (time.perf_counter() - begun)


def whole_loop(config) -> float:
    """Tokens a second by train_gpt's own log, over the same steps."""
    train_gpt.launch(config, PLATFORM)
    records = [json.loads(line) for line in (Path(config.run_folder) / "log.jsonl").read_text().splitlines()]
    return statistics.mean(r["tokens_per_s"] for r in records if r.get("tokens_per_s") and r["step"] > SKIPPED)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        prepare(["stdlib"], Path(folder) / "shards", encoding="bytes", max_bytes=2_000_000)
        settings = dict(data_folder=f"{folder}/shards", platform="cpu", processes=1, log_every=SKIPPED, stop_at=STEPS,
                        eval_every=10 ** 6, save_every=10 ** 6, sample_tokens=0, save_minutes=0.0)
        rates = []
        for number in range(ROUNDS):
            config = train_gpt.make_config("demo", run_folder=f"{folder}/run{number}", **settings)
            rates.append((bare_loop(config), whole_loop(config)))
            print(f"round {number + 1}: bare {rates[-1][0]:,.0f} tokens/s, train_gpt {rates[-1][1]:,.0f},"
                  f" ratio {rates[-1][1] / rates[-1][0]:.3f}", flush=True)
    bare, whole = (statistics.median(column) for column in zip(*rates))
    print(f"demo preset, {rt.available_cores()} cores: bare {bare:,.0f} tokens/s, train_gpt {whole:,.0f}, median ratio"
          f" {statistics.median(w / b for b, w in rates):.3f}")


if __name__ == "__main__":
    main()
