"""How long Python and torch_xla's tracing take for an optimizer step of GPT-2's twelve layers: the TPU must not wait for them.

    python bench/host_time.py               # two minutes on an idle machine

The very operations of train_gpt on XLA's CPU backend, twelve layers with the attention kernels as one operation each, but
narrow (64 channels), eight micro-steps a step. Times are CPU times of Python's thread, in ms, medians of 20 steps: what the
devices compute runs in other threads, and waiting is not work. 'sync' is torch_xla's walk over the program and its hand-over.
The arms alternate: as it is (a loop in the program, AdamW on flat buffers), a program for each micro-step, and that with
torch.optim.AdamW, as one would write it.
"""
import functools
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "py"))

import runtime as rt

rt.patch_environment("xla-cpu")

import torch

import checkpoint as ckpt
import gpt
import tpu_attention
import train_gpt
from micro_steps import MicroSteps
from optimizer import decay_groups

T, WIDTH, LAYERS, MICRO_STEPS, STEPS = 128, 64, 12, 8, 20
PARTS = ("micro-steps", "sync of the micro-steps", "reduction and clip", "optimizer", "sync")


def plain_kernel(T: int, n_head: int, head_size: int, interpret: bool):
    """Stands in for the splash kernel, which a CPU cannot run fast: to torch_xla it is the same single operation."""
    import jax
    import jax.numpy as jnp

    def attend(q, k, v):
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("hqd,hkd->hqk", q, k).astype(jnp.float32), -1e30)
        return jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, -1).astype(v.dtype), v)

    return attend


class Arm:
    """A model and its optimizer, and the times of its parts."""

    def __init__(self, title: str, runtime, in_loop: bool, flat: bool):
        self.title, self.runtime, self.in_loop, self.times = title, runtime, in_loop, defaultdict(list)
        config = train_gpt.make_config("tiny", T=T, n_layer=LAYERS, n_head=1, n_embd=WIDTH,
                                       tokens_per_step=2 * T, micro_batch=1)
        self.model = train_gpt.build_model(config, config.model(256))
        self.model.use(gpt.plain_attention, None, functools.partial(tpu_attention.joint_attention, interpret=True))
        self.model.to(runtime.device).train()
        self.optimizer = train_gpt.make_optimizer(config, self.model, True) if flat else torch.optim.AdamW(
            decay_groups(self.model, 0.1), lr=torch.tensor(1e-9), foreach=False, capturable=True)
        ckpt.load_optimizer(self.optimizer, self.model)
        self.gradients = MicroSteps(runtime, self.loss, self.model.parameters())
        self.tokens = torch.zeros(MICRO_STEPS, 1, T, dtype=torch.int32).to(runtime.device)
        self.begin()
        runtime.sync()
        name = "step_flat" if flat else "step"
        self.optimize = getattr(self.optimizer, name)
        setattr(self.optimizer, name, lambda *arguments: self.part("optimizer", lambda: self.optimize(*arguments)))

    def loss(self, x, y):
        with self.runtime.autocast():
            return self.model(x, y) / MICRO_STEPS

    def begin(self) -> None:
        for p in self.model.parameters():
            p.grad = None if self.in_loop else torch.zeros_like(p)

    def part(self, name: str, function):
        begun = time.thread_time()
        result = function()
        self.spent[name] += (time.thread_time() - begun) * 1e3
        return result

    def micro_steps(self) -> None:
        if self.in_loop:
            return self.part("micro-steps", lambda: self.gradients(self.tokens, self.tokens))
        for number in range(MICRO_STEPS):
            tokens = self.tokens[number].clone()
            self.runtime.sync()                 # a batch comes to the device as it is, not as a part of the program
            self.part("micro-steps", lambda: self.loss(tokens, tokens).backward())
            self.part("sync of the micro-steps", self.runtime.sync)

    def run(self) -> None:
        self.spent = defaultdict(float)
        self.micro_steps()
        train_gpt.set_learning_rate(self.optimizer, 1e-3, self.runtime.device)
        self.part("reduction and clip", lambda: self.runtime.optimizer_step(self.optimizer, 1.0))
        self.spent["reduction and clip"] -= self.spent["optimizer"]
        self.begin()
        self.part("sync", self.runtime.sync)
        next(self.model.parameters()).detach()[:1].cpu()        # nothing is left to do when the next arm begins
        for name in PARTS:
            self.times[name].append(self.spent[name])

    def median(self, name: str) -> float:
        return statistics.median(self.times[name][-STEPS:])


def main() -> None:
    tpu_attention.splash_kernel = plain_kernel
    runtime = rt.Runtime("bf16")
    arms = [Arm("as it is", runtime, True, True), Arm("a program each", runtime, False, True),
            Arm("and torch's AdamW", runtime, False, False)]
    for step in range(STEPS + 3):                       # the first ones compile
        for arm in arms:
            arm.run()
        if step % 5 == 0:
            print(f"step {step} of {STEPS + 2}", flush=True)
    print(f"\n{'ms of an optimizer step':26}" + "".join(f"{arm.title:>20}" for arm in arms))
    for name in PARTS:
        print(f"{name:26}" + "".join(f"{arm.median(name):20.1f}" for arm in arms))
    print(f"{'together':26}" + "".join(f"{sum(map(arm.median, PARTS)):20.1f}" for arm in arms))


if __name__ == "__main__":
    main()
