"""The model: geometry, first loss, the same function on every attention, precision, groups, schedule-free numbers."""
import math

import pytest
import torch

from gpt import (GPT, GPTConfig, LayerNorm, flops_per_token, fused_attention, generate, plain_attention, rms_normalise)
from optimizer import decay_groups

SMALL = GPTConfig(vocab_size=96, T=16, n_layer=2, n_head=2, n_embd=32)


def small_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**SMALL.__dict__, **changes}))
    for block in model.blocks:      # away from zero, so that every part of the block matters to the logits
        torch.nn.init.normal_(block.attn.c_proj.weight, std=0.3)
        torch.nn.init.normal_(block.mlp.c_proj.weight, std=0.3)
    return model


def tokens(B=3, T=16, V=96):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))


def test_gpt2_124m_has_gpt2s_parameters_and_starts_at_ln_vocabulary():
    torch.manual_seed(1)
    model = GPT(GPTConfig())
    padding = (50304 - 50257) * 768
    assert sum(p.numel() for p in model.parameters()) - padding == 124_439_808      # GPT-2 small, as published
    x = torch.randint(0, 50257, (1, 129), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(x[:, :-1], x[:, 1:]).item() == pytest.approx(math.log(50304), abs=0.05)


def test_both_attentions_compute_the_same_function():
    model = small_model()
    results = []
    for attention in (plain_attention, fused_attention):
        model.use(attention)
        model.zero_grad()
        loss = model(tokens(), tokens().roll(-1, 1))
        loss.backward()
        results.append((model(tokens()), model.blocks[0].attn.c_attn.weight.grad.clone()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-5, rtol=1e-5)


def test_no_token_sees_the_future():
    for attention in (plain_attention, fused_attention):
        model = small_model().eval()
        model.use(attention)
        changed = tokens()
        changed[:, 9] = (changed[:, 9] + 1) % 96
        same = (model(tokens()) == model(changed)).all(-1).all(0)
        assert same[:9].all() and not same[9:].any()


def test_residual_projections_start_at_zero_and_the_head_is_the_embedding():
    model = GPT(SMALL)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("c_proj.weight"))
    assert not [name for name, _ in model.named_parameters() if "head" in name]
    model(tokens(), tokens()).backward()
    unused = torch.ones(96, dtype=torch.bool)
    unused[tokens().unique()] = False
    assert model.wte.weight.grad[unused].abs().sum() > 0, "only the head reaches tokens that are not in the input"


def test_queries_and_keys_have_unit_root_mean_square():
    q = torch.randn(2, 2, 16, 16) * 37
    assert rms_normalise(q).square().mean(-1).allclose(torch.ones(2, 2, 16), atol=1e-4)
    assert rms_normalise(q.bfloat16()).dtype == torch.bfloat16
    assert not torch.allclose(small_model()(tokens()), small_model(qk_norm=False)(tokens()))


def test_norms_and_loss_stay_fp32_inside_autocast_and_matrices_do_not():
    model, seen = small_model(), {}
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, _, out, name=name: seen.__setitem__(name, out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(tokens(), tokens())
        logits = model(tokens())
    assert loss.dtype == logits.dtype == torch.float32
    assert seen["ln_f"] == seen["blocks.0.ln_1"] == torch.float32
    assert seen["blocks.0.attn.c_attn"] == seen["blocks.1.mlp.c_fc"] == torch.bfloat16
    assert LayerNorm(32)(torch.randn(3, 32).bfloat16()).dtype == torch.float32
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_matrices_decay_and_vectors_do_not():
    model = small_model()
    decayed, spared = decay_groups(model, 0.1)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in spared["params"]} == {1}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_recomputation_changes_no_gradient():
    import functools
    import torch.utils.checkpoint
    gradients = []
    for recompute in (None, functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)):
        model = small_model(dropout=0.2)
        model.use(plain_attention, recompute)
        torch.manual_seed(3)
        model(tokens(), tokens()).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_flops_agree_with_torchs_own_count():
    """torch counts the forward matrix products; training is three times that, attention masked but not skipped."""
    from torch.utils.flop_counter import FlopCounterMode
    model = small_model()
    model.use(plain_attention)
    with FlopCounterMode(display=False) as counter:
        model(tokens(B=1), tokens(B=1)).backward()
    assert flops_per_token(SMALL) * 16 == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_samples_repeat_stay_in_the_vocabulary_and_run_past_the_context():
    model = small_model()
    draw = [generate(model, tokens(B=2, T=4), 30, allowed=90, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    assert torch.equal(*draw) and draw[0].shape == (2, 34) and draw[0][:, 4:].max() < 90
