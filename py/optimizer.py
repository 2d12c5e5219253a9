"""AdamW and its learning rate, so that neither the step nor the rate changes XLA's program."""
import math

import torch


def decay_groups(model, weight_decay: float) -> list:
    """Parameter groups for AdamW: matrices and embeddings decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


def adamw(groups, on_xla: bool, flat: bool = False, **options) -> torch.optim.Optimizer:
    """AdamW over parameters or groups. On XLA the step and the learning rate are tensors on the device.

    flat: on XLA, one buffer a group, with the same state in a checkpoint: for models of many tensors, held whole by a device.

    Not SGD: torch's reads a learning rate that is a tensor on the host, and makes one that is a number part of the
    program, so on XLA every new rate would cost a compilation or a host read in every step.
    """
    if on_xla and flat:
        return FlatAdamW(groups, **options)
    return torch.optim.AdamW(groups, lr=torch.tensor(1e-9) if on_xla else 1e-9, foreach=False if on_xla else None,
                             capturable=on_xla, **options)


class FlatAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's arithmetic on one buffer a group, for XLA: a twentieth of the operations that Python must trace.

    `Runtime.optimizer_step` hands it the gradients as the one buffer that it reduces. The step and the learning rate are
    tensors on the device. `state` holds a group's buffers under its first parameter; `load_state_dict` takes, and
    `host_states` gives, the state of each parameter, as torch's AdamW keeps it.
    """

    KINDS = ("exp_avg", "exp_avg_sq")

    def __init__(self, groups, lr=None, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01):
        super().__init__(groups, dict(lr=torch.tensor(1e-9) if lr is None else lr, betas=betas, eps=eps,
                                      weight_decay=weight_decay))

    def load_state_dict(self, state_dict: dict) -> None:
        """Take {'state': {number of the parameter: {'step', 'exp_avg', 'exp_avg_sq'}}}; settings stay as they are."""
        rows = iter(sorted(state_dict["state"].items()))
        for parameters in self.members():
            states = [next(rows)[1] for _ in parameters]
            if len({float(state["step"]) for state in states}) > 1:
                raise ValueError("parameters of one group have made different numbers of steps: FlatAdamW counts them once")
            device = parameters[0].device
            self.state[parameters[0]] = {"step": torch.as_tensor(states[0]["step"], dtype=torch.float32).to(device), **{
                kind: torch.cat([state[kind].detach().cpu().reshape(-1) for state in states]).to(device)
                for kind in self.KINDS}}

    def host_states(self) -> dict:
        """{parameter: {'step', 'exp_avg', 'exp_avg_sq'}} on the CPU, by one transfer a buffer."""
        found = {}
        for parameters in self.members():
            state = {name: value.detach().to("cpu", copy=True) for name, value in self.state[parameters[0]].items()}
            pieces = {kind: state[kind].split([p.numel() for p in parameters]) for kind in self.KINDS}
            for number, p in enumerate(parameters):
                found[p] = {"step": state["step"].clone(), **{k: pieces[k][number].view(p.shape) for k in self.KINDS}}
        return found

    def members(self) -> list:
        return [group["params"] for group in self.param_groups if group["params"]]

    @torch.no_grad()
    def step_flat(self, gradient, scale) -> None:
        """One step with the gradients of all parameters, group after group, as one buffer, each times `scale`."""
        sizes = [sum(p.numel() for p in parameters) for parameters in self.members()]
        groups = [group for group in self.param_groups if group["params"]]
        for group, piece in zip(groups, gradient.split(sizes)):
            self.step_group(group, piece * scale)       # here, not before the split: XLA makes it part of the same pass

    def step_group(self, group: dict, gradient) -> None:
        parameters, lr, (beta1, beta2) = group["params"], group["lr"], group["betas"]
        state = self.state[parameters[0]]
        if not state:
            state.update(step=torch.zeros((), device=gradient.device), **{k: torch.zeros_like(gradient) for k in self.KINDS})
        step, average, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
        step += 1
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = -lr / (1 - beta1 ** step)                # the order of operations is that of torch's AdamW
        change = average / (square.sqrt() / ((1 - beta2 ** step).sqrt() * size) + group["eps"] / size)
        kept = 1 - lr * group["weight_decay"]
        for p, piece in zip(parameters, change.split([p.numel() for p in parameters])):
            if group["weight_decay"]:
                p.mul_(kept)
            p.add_(piece.view_as(p))


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
