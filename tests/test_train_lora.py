"""LoRA: the same training on one device and divided over eight, only the adapters change, the result is a plain model."""
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import run_script
from safetensors.torch import load_file

import checkpoint as ckpt
import instruction_data as data
import runtime as rt
import telemetry
import train_lora
from runtime import UserError

CPU = rt.Platform("cpu", 1, "test")


def losses(folder) -> list:
    return [record["loss"] for record in telemetry.read_log(folder) if "loss" in record]


def val_losses(folder) -> list:
    return [record["val_loss"] for record in telemetry.read_log(folder) if "val_loss" in record]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 24 steps on one CPU, through the real launcher; the other tests continue, repeat or read it."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    return train_lora.launch(train_lora.make_config("tiny", run_folder=str(folder), platform="cpu", max_steps=24,
                                                    eval_every=12, save_every=12), CPU)


def again(run, folder, processes: int = 1, **settings):
    """The same training on the same base model in another folder."""
    config = train_lora.make_config("tiny", model=str(run / "base"), run_folder=str(folder), platform="cpu",
                                    sample_tokens=0, **settings)
    return train_lora.launch(config, rt.Platform("cpu", processes, "test"))


# ---- training --------------------------------------------------------------------------------------------------------

def test_the_loss_falls_on_answers_that_were_not_trained_on(run):
    first, middle, last = val_losses(run)
    assert first < np.log(1024) and middle < first - 0.3 and last < middle
    assert losses(run)[-1] < losses(run)[0] - 0.3


@pytest.fixture(scope="module")
def short(run, tmp_path_factory):
    """Four steps on the same base, on one device, to be compared with."""
    return again(run, tmp_path_factory.mktemp("lora") / "short", **SHORT)


SHORT = dict(max_steps=4, save_every=4, eval_every=3)


@pytest.mark.parametrize("change", [dict(processes=2), dict(recompute=False), dict(micro_batch=8)])
def test_two_processes_no_recomputation_and_other_micro_batches_train_the_same(run, short, tmp_path, change):
    other = again(run, tmp_path / "other", **SHORT, **change)
    assert losses(other) == pytest.approx(losses(short), rel=1e-6) and len(losses(short)) == 4
    assert val_losses(other) == pytest.approx(val_losses(short), rel=1e-6) and len(val_losses(short)) == 3


SHARDED = """
    import os, runtime
    platform = runtime.patch_environment("virtual-tpu")
    import torch, torch_xla, train_lora
    from safetensors.torch import load_file
    os.mkdir("sharded")
    made, set_up = [], train_lora.set_up
    train_lora.set_up = lambda *arguments: made.append(set_up(*arguments)) or made[0]
    config = train_lora.make_config("tiny", model={base!r}, run_folder="sharded", platform="virtual-tpu",
                                    precision="fp32", max_steps=4, save_every=4, eval_every=3)
    train_lora.train_worker(config, sharded=True)
    model = made[0][0]
    held = load_file({base!r} + "/model.safetensors")
    frozen = dict((name.removeprefix("base_model.model.").replace(".base_layer", ""), p)
                  for name, p in model.named_parameters() if not p.requires_grad)
    assert frozen.keys() == held.keys()
    for name, p in frozen.items():
        divided = torch_xla._XLAC._get_xla_sharding_spec(p).startswith("{{devices=[")
        assert torch.equal(p.cpu(), held[name]), name
        assert divided == (p.dim() > 1), name
    head = model.get_base_model()
    assert head.lm_head.weight is head.model.embed_tokens.weight
"""


def test_divided_over_eight_devices_it_trains_the_same_and_leaves_the_base_alone(run, short, tmp_path):
    done = run_script(SHARDED.format(base=str(run / "base")), tmp_path)
    assert "divided over 8 devices" in done.stdout and "2 x 1 micro-steps x 8 devices" in done.stdout
    assert losses(tmp_path / "sharded") == pytest.approx(losses(short), rel=1e-6)
    assert val_losses(tmp_path / "sharded") == pytest.approx(val_losses(short), rel=1e-6)
    sharded, whole = ckpt.find_newest(tmp_path / "sharded").model(), ckpt.find_newest(short).model()
    assert all(name.endswith("weight") and "lora_" in name for name in whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, atol=2e-5, rtol=1e-4)
        if "lora_B" in name:
            assert tensor.abs().max() > 1e-3, "an adapter was not trained"
    compiles = [r["compiles"] for r in telemetry.read_log(tmp_path / "sharded") if "compiles" in r]
    assert compiles[1] == compiles[0], f"step two was compiled anew: {compiles}"


def test_a_run_that_lost_its_last_steps_goes_on_exactly(run, tmp_path):
    folder = tmp_path / "continued"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "step_00000024")
    changes = dict(run_folder=str(folder), resume_from=str(folder), platform="cpu", max_steps=24, eval_every=12,
                   save_every=12)
    with pytest.raises(UserError, match=r"cannot change rank \(4 -> 2\)"):
        train_lora.launch(train_lora.make_config("tiny", rank=2, **changes), CPU)
    train_lora.launch(train_lora.make_config("tiny", **changes), CPU)
    assert losses(folder) == losses(run) and val_losses(folder) == val_losses(run)
    mine, theirs = ckpt.find_newest(folder), ckpt.find_newest(run)
    for part in ("model", "optimizer"):
        for name, tensor in getattr(theirs, part)().items():
            assert torch.equal(getattr(mine, part)()[name], tensor), name


# ---- what it leaves --------------------------------------------------------------------------------------------------

def test_the_merged_model_is_a_plain_one_with_the_logits_of_base_and_adapter(run):
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    tokens = torch.tensor([tokenizer("What does json.dumps do?")["input_ids"]])
    with torch.no_grad():
        before = base(tokens).logits
        merged_logits = merged(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, run / "adapter")(tokens).logits
    torch.testing.assert_close(merged_logits, adapted, atol=1e-5, rtol=1e-5)
    assert (merged_logits - before).abs().max() > 0.1
    assert set(load_file(run / "merged/model.safetensors")) == set(load_file(run / "base/model.safetensors"))
    assert (run / "curve.png").stat().st_size > 5000 and json.loads((run / "config.json").read_text())["rank"] == 4


def test_the_merged_model_has_the_validation_loss_that_the_log_says(run):
    from transformers import AutoModelForCausalLM
    config = dataclasses.replace(train_lora.make_config("tiny", run_folder=str(run)), model=str(run / "merged"))
    _, val, _ = train_lora.load_rows(config)
    x, learned = torch.from_numpy(val.tokens[:16]).long(), torch.from_numpy(val.learned[:16])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(run / "merged")(x[:, :-1]).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none")
    assert (each * learned.flatten()).sum() / learned.sum() == pytest.approx(val_losses(run)[-1], rel=1e-5)


# ---- examples and mistakes -------------------------------------------------------------------------------------------

def test_only_the_answer_is_learned_and_rows_are_filled_or_cut(run):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(run / "base")
    examples = [data.Example("What does f do?", "It adds."), data.Example("What does g do?", "word " * 200)]
    rows = data.encode(examples, tokenizer, 64)
    (tokens, long), (learned, _) = rows.tokens, rows.learned
    assert tokenizer.decode(tokens[1:][learned == 1]) == "It adds.<|end|>" and rows.cut == 1
    assert tokenizer.decode(tokens[:learned.argmax() + 1]) == "### Question\nWhat does f do?\n### Answer\n"
    assert (tokens[learned.nonzero()[0][-1] + 1:] == tokenizer.eos_token_id).all() and len(long) == 65
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert data.prompt_text("Hi", tokenizer) == "<Hi>"
    with pytest.raises(UserError, match="T=3 leaves no room"):
        data.encode(examples, tokenizer, 3)


def test_the_library_documents_thousands_of_functions_and_each_is_on_one_side():
    train, val = data.read_examples("stdlib")
    assert len(train) > 1500 and 0.05 < len(val) / len(train) < 0.2
    assert not {e.prompt for e in train} & {e.prompt for e in val}
    answer = next(e.response for e in train + val if e.prompt == "What does textwrap.dedent do?")
    assert answer.startswith("Remove any common leading whitespace")


@pytest.mark.parametrize("line", ['{"prompt": "a"}', '{"prompt": "a", "response": " "}', "[1]", "not json"])
def test_a_line_that_is_no_example_is_named(tmp_path, line):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a", "response": "b"}\n\n' + line + "\n")
    with pytest.raises(UserError, match="mine.jsonl line 3 is not an example"):
        data.read_examples(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize("settings, words", [
    (dict(batch=10), "batch=10 cannot be shared equally by 1 devices that take micro_batch=4 at a time: use 8 and 12"),
    (dict(examples="nothing.jsonl"), "nothing.jsonl cannot be read"), (dict(rank=0), "rank=0 must be at least 1"),
    (dict(resume_from="nowhere"), "nowhere holds no usable checkpoint"),
    (dict(model="no/such/folder"), "no/such/folder' is not the folder of a model"),
])
def test_a_mistake_is_refused_in_one_sentence_before_anything_is_written(tmp_path, monkeypatch, settings, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        train_lora.launch(train_lora.make_config("tiny", platform="cpu", **{"micro_batch": 4, **settings}), CPU)
    assert not list(tmp_path.iterdir())
