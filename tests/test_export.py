"""The model alone: the same logits in transformers, in our own format, and back as a starting point."""
import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, clean_environment

import checkpoint as ckpt
import export_gpt2
import runtime as rt
import telemetry
import train_gpt
from gpt import GPT, GPTConfig, plain_attention
from runtime import UserError

CPU = rt.Platform("cpu", 1, "test")
GPT2_LIKE = GPTConfig(vocab_size=384, T=32, n_layer=2, n_head=2, n_embd=32, qk_norm=False)


def trained_like(geometry, seed=0):
    """A model with no zero and no unit left anywhere, as training leaves it: a swapped or dropped tensor shows."""
    torch.manual_seed(seed)
    model = GPT(geometry)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_run(folder, geometry, data_vocab_size=257):
    """A run folder with one checkpoint of a model; returns the model."""
    model = trained_like(geometry)
    config = {**dataclasses.asdict(train_gpt.make_config("tiny")), **dataclasses.asdict(geometry)}
    ckpt.save(folder, "step_00000005", 5, ckpt.model_tensors(model), {}, dict(config=config, vocab_size=geometry.vocab_size,
                                                                              data_vocab_size=data_vocab_size))
    return model


def tokens(geometry, below=257):
    return torch.randint(below, (3, geometry.T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of_transformers(folder, x):
    import transformers
    model, info = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()(x).logits


@torch.no_grad()
def test_transformers_computes_the_same_logits(tmp_path, capsys):
    model = save_run(tmp_path / "run", GPT2_LIKE)
    out = export_gpt2.export(tmp_path / "run", tmp_path / "out")
    x = tokens(GPT2_LIKE)
    ours, theirs = model(x)[..., :257], logits_of_transformers(out, x)
    assert theirs.shape == ours.shape and ours.std() > 0.5, "logits that hardly differ would prove nothing"
    torch.testing.assert_close(theirs, ours, atol=2e-5, rtol=1e-5)
    printed = capsys.readouterr().out
    assert "step 5" in printed and "format gpt2" in printed and "257 tokens, 127 rows of padding cut" in printed
    model.use(plain_attention)
    torch.testing.assert_close(model(x)[..., :257], theirs, atol=2e-5, rtol=1e-5)


def test_a_model_with_qk_norm_is_refused_as_gpt2_and_exported_plain(tmp_path, capsys):
    geometry = dataclasses.replace(GPT2_LIKE, qk_norm=True)
    model = save_run(tmp_path / "run", geometry)
    with pytest.raises(UserError, match="normalises queries and keys .* format='plain', or train with qk_norm=False") as caught:
        export_gpt2.export(tmp_path / "run", tmp_path / "out", "gpt2")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    out = export_gpt2.export(tmp_path / "run/step_00000005", tmp_path / "out", vocab_size=384)
    assert "format plain" in capsys.readouterr().out
    x = tokens(geometry, 384)
    assert torch.equal(export_gpt2.load(out)(x), model(x))


def test_the_plain_format_is_read_with_torch_safetensors_and_gpt_alone(tmp_path):
    """The words of the module's docstring, run beside nothing but a copy of gpt.py."""
    model = save_run(tmp_path / "run", dataclasses.replace(GPT2_LIKE, qk_norm=True))
    export_gpt2.export(tmp_path / "run", tmp_path / "exported")
    shutil.copy(ROOT / "py/gpt.py", tmp_path)
    recipe = [line.strip() for line in export_gpt2.__doc__.splitlines() if line.startswith("    ") and "python" not in line]
    assert len(recipe) == 3
    code = "\n".join(["import json, sys, torch", "from pathlib import Path", "from safetensors.torch import load_file",
                      "from gpt import GPT, GPTConfig", *recipe, "print(float(model.eval()(torch.arange(9)[None]).sum()))"])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True,
                          env={**clean_environment(), "PYTHONPATH": ""})
    with torch.no_grad():
        assert float(done.stdout) == pytest.approx(float(model(torch.arange(9)[None])[..., :257].sum()), rel=1e-4)


def test_what_cannot_be_exported_is_one_sentence(tmp_path):
    save_run(tmp_path / "run", GPT2_LIKE)
    export_gpt2.export(tmp_path / "run", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for change, words in ((dict(source=tmp_path / "empty"), "holds no good checkpoint"), (dict(format="gguf"), "'gguf' is not"),
                          (dict(out=tmp_path / "out"), "already holds a model"), (dict(vocab_size=385), "between 1 and the")):
        with pytest.raises(UserError, match=words):
            export_gpt2.export(**{"source": tmp_path / "run", "out": tmp_path / "new", **change})
    done = subprocess.run([sys.executable, ROOT / "py/export_gpt2.py", "empty", "--out", "new"], cwd=tmp_path, text=True,
                          capture_output=True, env=clean_environment())
    assert done.returncode == 2 and done.stderr.startswith("UserError: empty holds no") and "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


# ---- as a starting point -------------------------------------------------------------------------------------------------

@torch.no_grad()
def test_weights_made_by_transformers_give_the_same_logits_here(tmp_path):
    import transformers
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                                                                  initializer_range=0.2)).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    geometry = GPTConfig(vocab_size=384, T=32, n_layer=2, n_head=4, n_embd=32, qk_norm=False)
    model = GPT(geometry).eval()
    ckpt.load_model(model, export_gpt2.weights_for(geometry, tmp_path / "gpt2"))
    x = tokens(geometry)
    torch.testing.assert_close(model(x)[..., :300], theirs(x).logits, atol=2e-5, rtol=1e-5)
    assert torch.equal(export_gpt2.load(tmp_path / "gpt2/model.safetensors")(x), model(x)[..., :300])


@torch.no_grad()
def test_padding_the_vocabulary_hardly_changes_the_loss_of_logits_far_below_zero(tmp_path):
    """As a trained GPT-2's are: rows of zeros would take all of the probability."""
    model = trained_like(dataclasses.replace(GPT2_LIKE, vocab_size=300))
    model.ln_f.bias.copy_(torch.full((32,), 3.0))
    model.wte.weight.sub_(0.4)                              # every logit falls by about forty
    export_gpt2.write(export_gpt2.free_folder(tmp_path / "out"), ckpt.model_tensors(model), model.config, "gpt2")
    padded = GPT(GPT2_LIKE).eval()
    weights = export_gpt2.weights_for(GPT2_LIKE, tmp_path / "out")
    x, y = tokens(GPT2_LIKE), tokens(GPT2_LIKE).roll(1)
    losses = []
    for rows in (weights["wte.weight"], torch.cat([weights["wte.weight"][:300], torch.zeros(84, 32)])):
        ckpt.load_model(padded, {**weights, "wte.weight": rows})
        losses.append(float(padded(x, y)))
    assert model(x)[..., :300].mean() < -20
    assert losses[0] - float(model(x, y)) < 0.3 < 10 < losses[1] - float(model(x, y)), (losses, float(model(x, y)))


def test_a_run_starts_from_exported_weights_and_a_resume_needs_them_no_more(shards, tmp_path):
    def tiny(folder, **settings):
        return train_gpt.make_config("tiny", data_folder=str(shards), run_folder=str(tmp_path / folder), platform="cpu",
                                     sample_tokens=0, max_steps=4, eval_every=2, save_every=2, qk_norm=False, **settings)
    first = train_gpt.launch(tiny("first"), CPU)
    out = export_gpt2.export(first, tmp_path / "out", vocab_size=384)
    second = train_gpt.launch(tiny("second", init_from=str(out), stop_at=2, processes=2), CPU)
    val = [{r["step"]: r["val_loss"] for r in telemetry.read_log(run) if "val_loss" in r} for run in (first, second)]
    assert val[1][0] == pytest.approx(val[0][4], rel=1e-6) and val[1][0] < val[0][0]
    shutil.rmtree(out)
    import resume_gpt
    assert ckpt.find_newest(resume_gpt.resume(second, CPU, sample_tokens=0)).step == 4


def test_weights_that_do_not_fit_are_refused_with_a_list_before_anything_is_written(shards, tmp_path):
    save_run(tmp_path / "run", GPT2_LIKE)
    out = export_gpt2.export(tmp_path / "run", tmp_path / "out")
    def begin(**settings):
        return train_gpt.launch(train_gpt.make_config("tiny", **{"data_folder": str(shards), "platform": "cpu", "n_layer": 2,
                                                                 "run_folder": str(tmp_path / "new"), "init_from": str(out),
                                                                 **settings}), CPU)
    with pytest.raises(UserError, match=r"n_layer is 2 there and 3 here; qk_norm is False there and True here; T is 32 there,"
                                        r" which a larger 64 here does not take: change") as caught:
        begin(n_layer=3, T=64, tokens_per_step=256)
    assert "\n" not in str(caught.value)
    for source, words in (("nowhere", "nowhere is no exported model: .*model.safetensors"), (str(tmp_path / "run"), "is missing")):
        with pytest.raises(UserError, match=words):
            begin(init_from=source)
    (out / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot be read"):
        begin(qk_norm=False)
    other = json.loads((out / "config.json").read_text())
    with pytest.raises(UserError, match="is no GPT-2 as this code computes it: activation_function='relu'"):
        export_gpt2.exported_geometry({"wte.weight": 0}, {**other, "activation_function": "relu"}, out)
    assert not (tmp_path / "new").exists()
