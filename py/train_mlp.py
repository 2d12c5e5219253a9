"""The smallest complete template: an MLP that learns a function, on TPU, GPU and CPU alike. Read it in one sitting.

    python py/train_mlp.py

The worker is what every rank runs. Five lines differ from a single-GPU script, and they are marked.
"""
from dataclasses import dataclass

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import torch
from torch import nn


@dataclass(frozen=True)
class MLPConfig:
    steps: int = 200
    batch: int = 512            # samples per optimizer step, over all devices
    hidden: int = 64
    learning_rate: float = 1e-2
    log_every: int = 50
    seed: int = 7


def make_samples(config: MLPConfig, step: int):
    """(batch, 2) points and (batch, 1) targets of step `step`: sin(3a) * cos(3b). A function of (seed, step) alone."""
    generator = torch.Generator().manual_seed(rt.mix_seed(config.seed, step))
    x = torch.rand(config.batch, 2, generator=generator) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * torch.cos(3 * x[:, 1:])


def train_worker(config: MLPConfig, processes: int = 0) -> None:
    runtime = rt.Runtime("auto", processes)                                   # 1. device, rank and precision
    torch.manual_seed(config.seed)                                            # 2. the same initial weights on every rank
    model = nn.Sequential(nn.Linear(2, config.hidden), nn.Tanh(), nn.Linear(config.hidden, config.hidden), nn.Tanh(),
                          nn.Linear(config.hidden, 1)).to(runtime.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, capturable=runtime.is_xla)
    if runtime.is_xla:
        runtime.print("the first step is compiled: up to a minute on a TPU")
    mine = slice(runtime.rank, None, runtime.world_size)                      # 3. every rank takes its share of the batch
    for step in range(1, config.steps + 1):
        x, y = (part[mine].to(runtime.device) for part in make_samples(config, step))
        with runtime.autocast():
            prediction = model(x)
        loss = nn.functional.mse_loss(prediction.float(), y)
        runtime.scaler.scale(loss).backward()
        runtime.optimizer_step(optimizer, max_norm=1.0)                       # 4. average over the ranks, clip, step
        runtime.sync()                                                        # 5. hand the traced step to the device
        if step % config.log_every == 0 or step == 1:
            mean_loss = runtime.host_values(runtime.all_reduce(loss.detach()))
            runtime.print(f"step {step:4}/{config.steps}  loss {mean_loss:.5f}")
    runtime.check_replicas(dict(model.named_parameters()), "at the end")
    runtime.print(f"done: {runtime.world_size} process{'es' if runtime.world_size > 1 else ''} on"
                  f" {runtime.device_kind()}, {runtime.precision}, all replicas equal")


def launch(config: MLPConfig | None = None, platform: rt.Platform | None = None, processes: int = 0) -> None:
    """Check the settings, then train on every device of the platform."""
    config = config or MLPConfig()
    platform = platform or rt.patch_environment()
    processes = rt.resolve_processes(platform, processes)
    if config.batch % processes:
        raise rt.UserError(f"batch={config.batch} cannot be shared equally by {processes} processes: use"
                           f" {config.batch // processes * processes or processes}.")
    rt.launch(train_worker, (config, processes), platform, processes)


if __name__ == "__main__":
    rt.run_main(launch)
