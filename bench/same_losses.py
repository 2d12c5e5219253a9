"""Do the TPU's shortcuts change what is learned? Losses at equal seed, in fp32 and as a TPU trains.

    python bench/same_losses.py         # 200 steps, some minutes on a CPU

Two arms train the same small model on the same bytes: one plainly, that is by PyTorch on the CPU in fp32 with its own fused
attention, F.cross_entropy and torch.optim.AdamW; one as a TPU does, on XLA's CPU backend in bf16 with the attention kernels
(interpreted), the bf16 residual stream, the loss in one pass and AdamW on flat buffers. A third, plain from another seed of
the order of data, shows how large a difference that means nothing is.
"""
import argparse
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime as rt

rt.patch_environment("xla-cpu")

import numpy as np
import torch

import gpt
import tpu_attention
import train_gpt

T, BATCH = 128, 8


def losses(precision: str, steps: int, data_seed: int = 0) -> np.ndarray:
    """The training losses (steps,) of one arm."""
    runtime = rt.Runtime(precision)
    if precision == "fp32":
        runtime.device, runtime.is_xla = torch.device("cpu"), False
    config = train_gpt.make_config("tiny", T=T, n_layer=2, n_head=2, n_embd=128, tokens_per_step=T * BATCH, micro_batch=BATCH,
                                   max_steps=steps, warmup_steps=steps // 10, learning_rate=1e-3, vocab_size=256)
    model = train_gpt.build_model(config, config.model(256))
    kernels = functools.partial(tpu_attention.joint_attention, interpret=True) if precision == "bf16" else None
    model.use(gpt.attention_for(runtime.device.type), None, kernels)
    model.to(runtime.device).train()
    optimizer = train_gpt.make_optimizer(config, model, runtime.is_xla)
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), dtype=np.uint8).astype(np.int32)
    order, found = np.random.default_rng(data_seed), []
    for step in range(steps):
        windows = np.stack([text[start:start + T + 1] for start in order.integers(0, len(text) - T - 1, BATCH)])
        x, y = train_gpt.on_device((windows[:, :-1].copy(), windows[:, 1:].copy()), runtime)
        train_gpt.set_learning_rate(optimizer, train_gpt.learning_rate(config, step), runtime.device)
        with runtime.autocast():
            loss = model(x, y)
        loss.backward()
        runtime.optimizer_step(optimizer, config.clip_norm)
        found.append(runtime.host_values(loss.detach().view(1))[0])
        if (step + 1) % 50 == 0:
            print(f"{precision} step {step + 1}: loss {found[-1]:.4f}", flush=True)
    return np.array(found)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    exact, fast, other = losses("fp32", steps), losses("bf16", steps), losses("fp32", steps, data_seed=1)
    for name, arm in (("as on a TPU", fast), ("another order of data", other)):
        apart = np.abs(arm - exact)
        print(f"{name:22} against fp32: largest difference {apart.max():.4f} at step {apart.argmax() + 1}, mean"
              f" {apart.mean():.4f}; last 20 steps: {arm[-20:].mean():.4f} against {exact[-20:].mean():.4f}")


if __name__ == "__main__":
    main()
