"""The TPU's attention kernels, run as plain operations on XLA's CPU backend, against attention written out."""
import importlib.util

import pytest
from conftest import run_script

import tpu_attention

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None or importlib.util.find_spec("torch_xla") is None,
                               reason="jax or torch_xla is not installed here")

SETUP = """
    import os, sys
    import runtime
    runtime.patch_environment("xla-cpu")
    import torch, torch_xla
    import gpt, tpu_attention
    device = torch_xla.device()
    torch.manual_seed(0)

    def difference(found, expected):
        return float((found.detach().cpu().float() - expected).norm() / expected.norm())
"""


@needs_jax
def test_kernels_compute_what_plain_attention_computes(tmp_path):
    """Outputs and gradients, within bf16's rounding, for heads of 64 and 128, with and without normalised queries."""
    run_script(SETUP + """
    for H, D, T, norm in ((2, 64, 256, True), (1, 128, 128, True), (2, 64, 128, False), (2, 128, 256, False)):
        if D < tpu_attention.narrowest_heads():
            continue
        B, C = 2, H * D
        qkv, dy = torch.randn(B, T, 3 * C).bfloat16(), torch.randn(B, T, C).bfloat16()
        a, b = qkv.to(device).requires_grad_(), qkv.float().requires_grad_()
        y = tpu_attention.joint_attention(a, H, norm, interpret=True)
        y.backward(dy.to(device))
        q, k, v = (part.view(B, T, H, D).transpose(1, 2) for part in b.split(C, -1))
        if norm:
            q, k = gpt.rms_normalise(q), gpt.rms_normalise(k)
        expected = gpt.plain_attention(q, k, v, 0.0, True).transpose(1, 2).reshape(B, T, C)
        expected.backward(dy.float())
        assert difference(y, expected.detach()) < 0.01, (H, D, T, norm)
        assert difference(a.grad, b.grad) < 0.01, (H, D, T, norm)
    """, tmp_path)


@needs_jax
def test_loss_and_norm_written_out_for_xla_are_the_same_functions(tmp_path):
    run_script(SETUP + """
    logits, targets = torch.randn(2, 8, 300) * 5, torch.randint(0, 300, (2, 8), dtype=torch.int32)
    a, b = logits.clone().requires_grad_(), logits.to(device).requires_grad_()
    expected, found = gpt.token_losses(a, targets), gpt.token_losses(b, targets.to(device))
    expected.mean().backward()
    found.mean().backward()
    assert difference(found, expected.detach()) < 1e-5 and difference(b.grad, a.grad) < 1e-5
    for scale in (0.1, 5.0, 20.0):          # with the target's logit known roughly beforehand; a loss of 100 nats is among them
        logits = torch.randn(2, 8, 300) * scale
        a, b = logits.clone().requires_grad_(), logits.to(device).requires_grad_()
        expected = gpt.token_losses(a, targets)
        near = torch.gather(logits, -1, targets.long()[..., None])[..., 0] * 1.01
        found = gpt.token_losses(b, targets.to(device), near.to(device))
        expected.mean().backward()
        found.mean().backward()
        assert difference(found, expected.detach()) < 1e-5 and difference(b.grad, a.grad) < 1e-5, scale
    assert expected.max() > 80
    x, norm = torch.randn(2, 8, 64) * 3 + 1, gpt.LayerNorm(64)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    expected = norm(x).detach()
    assert difference(norm.to(device)(x.to(device)), expected) < 1e-5
    """, tmp_path)


@pytest.mark.parametrize("T, head_size, dropout, expected", [
    (1024, 128, 0.0, None), (128, 128, 0.0, None), (1024, 64, 0.1, "no dropout"), (100, 64, 0.0, "T=100"),
    (640, 64, 0.0, "T=640 is not a multiple of 512"), (1024, 48, 0.0, "heads of 48")])
@needs_jax
def test_says_what_the_kernels_cannot_serve(T, head_size, dropout, expected):
    reason = tpu_attention.why_not(T, head_size, dropout)
    assert reason is None if expected is None else expected in reason


@needs_jax
@pytest.mark.parametrize("version, narrowest", [("0.6.2", 128), ("0.7.1", 64), ("0.10.2", 64)])
def test_heads_of_64_need_jax_0_7(monkeypatch, version, narrowest):
    monkeypatch.setattr(tpu_attention.importlib.metadata, "version", lambda name: version)
    assert tpu_attention.narrowest_heads() == narrowest
    reason = tpu_attention.why_not(1024, 64, 0.0)
    assert reason is None if narrowest == 64 else "multiple of 128, which JAX before 0.7 wants" in reason


@needs_jax
def test_a_jax_that_does_not_fit_ends_in_one_line_and_plain_attention(tmp_path):
    """A real refusal, by JAX, of a format that it does not know. The device serves the run afterwards."""
    done = run_script(SETUP + """
    class LikeATpu(runtime.Runtime):
        def device_kind(self):
            return "v5e"

    run, tpu_attention.MOSAIC_FORMAT = LikeATpu("bf16"), 99
    assert tpu_attention.choose(run, 2, 128, 128, 1, True, 0.0) is None
    model = gpt.GPT(gpt.GPTConfig(256, 128, 1, 1, 128))
    model.use(gpt.plain_attention)
    model.to(device)
    x, y = torch.randint(0, 256, (2, 2, 128), dtype=torch.int32).to(device)
    with run.autocast():
        loss = model(x, y)
    loss.backward()
    assert abs(run.host_values(loss.detach().view(1))[0] - 5.5) < 0.5
    """, tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("attention: written out instead of the TPU's kernels")]
    assert len(lines) == 1 and "slower, because MLIRError: " in lines[0] and "Traceback" not in done.stdout


@needs_jax
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed here")
def test_the_installed_libtpu_takes_the_kernels(tmp_path):
    """Forward and backward, heads of 64 and 128, by the compiler itself: format, entry and memory. No TPU is needed."""
    done = run_script("""
    import os, sys
    import preflight
    os.environ.update(preflight.COMPILER_ENVIRONMENT, TPU_ACCELERATOR_TYPE="v5litepod-8")
    preflight.rt.patch_environment("xla-cpu")
    from pathlib import Path
    import torch_xla, tpu_attention
    modules = []
    tpu_attention.rt.xla_operation = lambda name, module: modules.append(module)
    served = [(n_head, T) for n_head, T in ((6, 1024), (12, 1024), (12, 512)) if not tpu_attention.why_not(T, 768 // n_head, 0.0)]
    for n_head, T in served:
        tpu_attention.lowered((8, T, 2304), n_head, True, False)
    compiler = preflight.Compiler(preflight.CHIPS["v5e-8"])
    for module in modules:
        found = compiler.compile(module, [], Path("program.txt"))
        assert "error" not in found, found["error"][:600]
        assert "tpu_custom_call" in Path("program.txt").read_text()
    assert len(modules) == 2 * len(served) >= 2
    """, tmp_path)
    assert done.returncode == 0
