"""AdamW on flat buffers, as XLA gets it, against torch's own: the same steps, the same checkpoint."""
import pytest
import torch
from conftest import run_script

from optimizer import FlatAdamW, adamw

SETUP = """
    import os, sys
    import runtime
    runtime.patch_environment("xla-cpu")
    import torch, torch_xla
    import checkpoint as ckpt
    from optimizer import FlatAdamW, adamw, set_learning_rate
    run = runtime.Runtime("fp32")

    def network():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))

    def groups(model):
        return [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]

    def train(model, optimizer, device, steps, clip=1.0):
        for step in steps:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(device)
            set_learning_rate(optimizer, 1e-2 / (step + 1), device)
            (model(x) - 1).square().mean().backward()
            run.optimizer_step(optimizer, clip)
            run.sync()
"""


def test_flat_steps_are_torchs_steps_and_either_goes_on_from_the_others_state(tmp_path):
    """Weights and state after six steps with clipping and decay; then three more, each from what the other saved."""
    run_script(SETUP + """
    plain, flat = network(), network().to(run.device)
    one = torch.optim.AdamW(groups(plain), lr=1e-9, betas=(0.9, 0.95))
    other = adamw(groups(flat), True, flat=True, betas=(0.9, 0.95))
    ckpt.load_optimizer(one, plain)
    ckpt.load_optimizer(other, flat)

    def apart():
        pairs = [(ckpt.optimizer_tensors(one, plain), ckpt.optimizer_tensors(other, flat)),
                 (ckpt.model_tensors(plain), ckpt.model_tensors(flat))]
        assert all(a.keys() == b.keys() for a, b in pairs)
        assert all(a[name].shape == b[name].shape and a[name].dtype == b[name].dtype for a, b in pairs for name in a)
        return max(float((a[name] - b[name]).abs().max()) for a, b in pairs for name in a)

    for steps in (range(6), range(6, 9)):
        run.is_xla, run.device = False, torch.device("cpu")
        train(plain, one, run.device, steps, clip=0.05)
        run.is_xla, run.device = True, torch_xla.device()
        train(flat, other, run.device, steps, clip=0.05)
        assert apart() < 2e-6, apart()
        saved = ckpt.optimizer_tensors(one, plain), ckpt.optimizer_tensors(other, flat)
        assert {float(saved[1][f"step/{name}"]) for name, p in flat.named_parameters()} == {steps[-1] + 1.0}
        ckpt.load_optimizer(one, plain, saved[1])
        ckpt.load_optimizer(other, flat, saved[0])
    """, tmp_path)


def test_without_a_loaded_state_it_starts_at_zero(tmp_path):
    run_script(SETUP + """
    ends = []
    for loads in (True, False):
        model = network().to(run.device)
        optimizer = adamw(model.parameters(), True, flat=True)
        if loads:
            ckpt.load_optimizer(optimizer, model)
        train(model, optimizer, run.device, range(3))
        ends.append(ckpt.model_tensors(model))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    """, tmp_path)


def test_a_state_of_different_steps_is_refused():
    model = torch.nn.Linear(2, 2)
    optimizer = FlatAdamW(model.parameters())
    state = {n: dict(step=torch.tensor(float(n)), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
             for n, p in enumerate(model.parameters())}
    with pytest.raises(ValueError, match="different numbers of steps"):
        optimizer.load_state_dict({"state": state, "param_groups": []})


def test_only_xla_gets_flat_buffers_and_only_on_request():
    parameters = list(torch.nn.Linear(2, 2).parameters())
    kinds = {(on_xla, flat): type(adamw(parameters, on_xla, flat)) for on_xla in (True, False) for flat in (True, False)}
    assert kinds.pop((True, True)) is FlatAdamW and set(kinds.values()) == {torch.optim.AdamW}
