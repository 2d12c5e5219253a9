"""AdamW and its learning rate, so that neither the step nor the rate changes XLA's program."""
import math

import torch


def decay_groups(model, weight_decay: float) -> list:
    """Parameter groups for AdamW: matrices and embeddings decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def adamw(groups, on_xla: bool, **options) -> torch.optim.AdamW:
    """AdamW over parameters or groups. On XLA the step and the learning rate are tensors on the device.

    Not SGD: torch's reads a learning rate that is a tensor on the host, and makes one that is a number part of the
    program, so on XLA every new rate would cost a compilation or a host read in every step.
    """
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-9) if on_xla else 1e-9, foreach=False if on_xla else None,
                             capturable=on_xla, **options)


def set_learning_rate(optimizer, value: float, device) -> None:
    lr = torch.tensor(value).to(device) if device.type == "xla" else value
    for group in optimizer.param_groups:
        group["lr"] = lr


def warmup_cosine(step: int, peak: float, warmup_steps: int, max_steps: int, final_fraction: float) -> float:
    """Linear warm-up, then cosine; a function of the step alone, so it is the same for any number of processes."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    lowest = peak * final_fraction
    return lowest + 0.5 * (1 + math.cos(math.pi * min(1.0, progress))) * (peak - lowest)
