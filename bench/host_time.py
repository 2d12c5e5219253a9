"""How long Python and torch_xla's tracing take for GPT-2's twelve layers: the TPU must not wait for them.

    python bench/host_time.py               # a minute on an idle machine; run nothing beside it

The very operations of train_gpt on XLA's CPU backend, twelve layers with the attention kernels as one operation each, but
narrow (64 channels), so that next to nothing is left to compute: what remains is the host's work. A part ends when Python
has it traced; 'sync' is torch_xla's walk over the program and its hand-over. Medians of 20 optimizer steps, in ms. The
last columns are the same with torch.optim.AdamW in place of the flat one, alternating within the run.
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
from optimizer import decay_groups

T, WIDTH, LAYERS, STEPS = 128, 64, 12, 20
PARTS = ("forward", "backward", "sync of a micro-step", "reduction and clip", "optimizer", "zeros for the gradients",
         "sync of the optimizer")


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

    def __init__(self, runtime, flat: bool):
        self.runtime, self.flat, self.times = runtime, flat, defaultdict(list)
        config = train_gpt.make_config("tiny", T=T, n_layer=LAYERS, n_head=1, n_embd=WIDTH,
                                       tokens_per_step=2 * T, micro_batch=1)
        self.model = train_gpt.build_model(config, config.model(256))
        self.model.use(gpt.plain_attention, None, functools.partial(tpu_attention.joint_attention, interpret=True))
        self.model.to(runtime.device).train()
        groups = decay_groups(self.model, 0.1)
        self.optimizer = train_gpt.make_optimizer(config, self.model, True) if flat else torch.optim.AdamW(
            groups, lr=torch.tensor(1e-9), foreach=False, capturable=True)
        ckpt.load_optimizer(self.optimizer, self.model)
        runtime.clear_gradients(self.model.parameters())
        runtime.sync()
        self.tokens = torch.zeros(1, T, dtype=torch.int32).to(runtime.device)
        name = "step_flat" if flat else "step"
        self.step = getattr(self.optimizer, name)
        setattr(self.optimizer, name, self.timed_step)

    def timed_step(self, *arguments):
        begun = time.perf_counter()
        result = self.step(*arguments)
        self.inside = (time.perf_counter() - begun) * 1e3
        return result

    def part(self, name: str, function):
        begun = time.perf_counter()
        result = function()
        self.times[name].append((time.perf_counter() - begun) * 1e3)
        return result

    def forward(self):
        with self.runtime.autocast():
            return self.model(self.tokens, self.tokens) / 8

    def optimizer_step(self) -> None:
        runtime, parameters = self.runtime, list(self.model.parameters())
        train_gpt.set_learning_rate(self.optimizer, 1e-3, runtime.device)
        begun = time.perf_counter()
        clear, cleared = runtime.clear_gradients, []
        runtime.clear_gradients = lambda which: cleared.append(which)     # timed as a part of its own, below
        runtime.optimizer_step(self.optimizer, 1.0)
        runtime.clear_gradients = clear
        self.times["reduction and clip"].append((time.perf_counter() - begun) * 1e3 - self.inside)
        self.times["optimizer"].append(self.inside)
        self.part("zeros for the gradients", lambda: clear(parameters))

    def run(self) -> None:
        loss = self.part("forward", self.forward)
        self.part("backward", loss.backward)
        value = loss.detach().view(1)
        self.part("sync of a micro-step", self.runtime.sync)
        value.cpu()                                     # what the device computes is not the host's time
        self.optimizer_step()
        self.part("sync of the optimizer", self.runtime.sync)
        next(self.model.parameters()).detach()[:1].cpu()

    def median(self, name: str) -> float:
        return statistics.median(self.times[name][-STEPS:])


def main() -> None:
    tpu_attention.splash_kernel = plain_kernel
    runtime = rt.Runtime("bf16")
    arms = [Arm(runtime, True), Arm(runtime, False)]
    for step in range(STEPS + 3):                       # the first ones compile
        for arm in arms:
            arm.run()
        if step % 5 == 0:
            print(f"step {step} of {STEPS + 2}", flush=True)
    print(f"\n{'ms':26}{'as it is':>10}{'torch.optim.AdamW':>20}")
    for name in PARTS:
        print(f"{name:26}{arms[0].median(name):10.1f}{arms[1].median(name):20.1f}")
    micro, rest = PARTS[:3], PARTS[3:]
    for title, names in (("a micro-step", micro), ("the optimizer step", rest), ("both", PARTS)):
        print(f"{title:26}" + "".join(f"{sum(map(arm.median, names)):{width}.1f}" for arm, width in zip(arms, (10, 20))))
    eight = 8 * sum(map(arms[0].median, micro)) + sum(map(arms[0].median, rest))
    print(f"an optimizer step of eight micro-steps: {eight:.0f} ms")


if __name__ == "__main__":
    main()
