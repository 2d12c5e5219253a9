"""Take the model alone out of a run, and start a run from a model: safetensors plus config.json, two formats.

    python py/export_gpt2.py runs/gpt --out exported            # the newest good checkpoint of a run
    python py/export_gpt2.py runs/gpt/best --out exported       # or a checkpoint folder
    python py/train_gpt.py --init_from exported ...             # begin a new run from such weights

`gpt2` (qk_norm off): what `transformers` loads as GPT2LMHeadModel, with its names and its transposed matrices.
`plain` (any geometry): our own names; torch, safetensors and gpt.py are all that reads it:

    config = GPTConfig(**json.loads(Path("exported/config.json").read_text())["geometry"])
    model = GPT(config)
    model.load_state_dict(load_file("exported/model.safetensors"))
"""
import argparse
import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import checkpoint as ckpt
from gpt import GPT, GPTConfig
from runtime import UserError, run_main

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# GPT-2's names of a block's parts. Its matrices are stored (in, out), ours (out, in).
BLOCK_PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")     # constants in older GPT-2 files, no weights


# ---- out --------------------------------------------------------------------------------------------------------

def export(source: str | Path, out: str | Path, format: str = "auto", vocab_size: int = 0) -> Path:
    """Write the model of a run or checkpoint folder to the folder `out`. Returns it.

    format: 'gpt2', 'plain', or 'auto': gpt2 where the geometry allows it. vocab_size: rows to keep of the padded
    vocabulary; 0 for those that the data uses. Prints what was written and what was cut. Raises UserError.
    """
    newest = find_checkpoint(source)
    tensors, state = newest.model(), newest.state()
    geometry = geometry_of(state)
    chosen = choose_format(format, geometry)
    kept = vocab_size or state.get("data_vocab_size") or geometry.vocab_size
    tensors, geometry = cut_vocabulary(tensors, geometry, kept)
    out = free_folder(out)
    write(out, tensors, geometry, chosen)
    print(f"{newest.path} at step {newest.step} -> {out}, format {chosen}, {geometry}\n"
          f"vocabulary: {kept} tokens, {state['vocab_size'] - kept or 'no'} rows of padding cut")
    return out


def find_checkpoint(source: str | Path) -> ckpt.Checkpoint:
    if (Path(source) / ckpt.STATE).exists() or (Path(source) / ckpt.MANIFEST).exists():
        return ckpt.open_checkpoint(source)
    newest = ckpt.find_newest(source)
    if newest is None:
        raise UserError(f"{source} holds no good checkpoint: give a run folder or a checkpoint folder.")
    return newest


def geometry_of(state: dict) -> GPTConfig:
    """The model's geometry from a checkpoint's state."""
    config = state["config"]
    names = [field.name for field in dataclasses.fields(GPTConfig) if field.name != "vocab_size"]
    return GPTConfig(vocab_size=state["vocab_size"], **{name: config[name] for name in names})


def choose_format(format: str, geometry: GPTConfig) -> str:
    if format not in ("auto", "gpt2", "plain"):
        raise UserError(f"format={format!r} is not known: use 'auto', 'gpt2' or 'plain'.")
    if format == "gpt2" and geometry.qk_norm:
        raise UserError("This model normalises queries and keys (qk_norm), which GPT-2 does not: export it with"
                        " format='plain', or train with qk_norm=False.")
    return format if format != "auto" else "plain" if geometry.qk_norm else "gpt2"


def cut_vocabulary(tensors: dict, geometry: GPTConfig, kept: int) -> tuple:
    """Tensors and geometry with the first `kept` tokens alone: the others never occur, they only fill up the matrix."""
    if not 0 < kept <= geometry.vocab_size:
        raise UserError(f"vocab_size={kept} must be between 1 and the model's {geometry.vocab_size}.")
    return ({**tensors, "wte.weight": tensors["wte.weight"][:kept].contiguous()},
            dataclasses.replace(geometry, vocab_size=kept))


def free_folder(out: str | Path) -> Path:
    out = Path(out)
    if any((out / name).exists() for name in (CONFIG, WEIGHTS)):
        raise UserError(f"{out} already holds a model: give another folder.")
    out.mkdir(parents=True, exist_ok=True)
    return out


def write(out: Path, tensors: dict, geometry: GPTConfig, format: str) -> None:
    if format == "gpt2":
        tensors, config = to_gpt2(tensors), gpt2_config(geometry)
    else:
        config = {"format": "plain", "geometry": dataclasses.asdict(geometry)}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(config, indent=1) + "\n")


def to_gpt2(tensors: dict) -> dict:
    """{our name: tensor} -> {GPT-2's name: tensor}; the output head is the embedding, and is not stored again."""
    return {f"transformer.{gpt2_name(name)}": tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
            for name, tensor in tensors.items()}


def gpt2_name(name: str) -> str:
    return name.replace("blocks.", "h.", 1) if name.startswith("blocks.") else name


def gpt2_config(geometry: GPTConfig) -> dict:
    """The config.json that transformers wants. Our GELU is the tanh approximation, which it calls gelu_new."""
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": geometry.vocab_size,
            "n_positions": geometry.T, "n_ctx": geometry.T, "n_embd": geometry.n_embd, "n_layer": geometry.n_layer,
            "n_head": geometry.n_head, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
            "attn_pdrop": geometry.dropout, "embd_pdrop": geometry.dropout, "resid_pdrop": geometry.dropout,
            "tie_word_embeddings": True, "dtype": "float32",
            # GPT-2's end of text where that is the vocabulary; elsewhere none is known here.
            "bos_token_id": 50256 if geometry.vocab_size == 50257 else None,
            "eos_token_id": 50256 if geometry.vocab_size == 50257 else None}


# ---- in ---------------------------------------------------------------------------------------------------------

def load(source: str | Path) -> GPT:
    """The exported model, on the CPU, ready for `gpt.generate`. Raises UserError when it is no complete export."""
    tensors, config = read(source)
    geometry = exported_geometry(tensors, config, source)
    model = GPT(geometry)
    ckpt.load_model(model, tensors)
    return model.eval()


def weights_for(geometry: GPTConfig, source: str | Path) -> dict:
    """{our name: fp32 tensor} of exported weights, fitted to a geometry, to start a run from.

    A smaller vocabulary is padded with the mean row: zeros would outweigh all of a trained GPT-2's tokens, whose logits
    lie far below 0. Longer position tables are cut. Raises UserError with the list of what does not fit.
    """
    tensors, config = read(source)
    found = exported_geometry(tensors, config, source)
    wrong = [f"{name} is {getattr(found, name)} there and {getattr(geometry, name)} here"
             for name in ("n_layer", "n_head", "n_embd", "qk_norm") if getattr(found, name) != getattr(geometry, name)]
    wrong += [f"{name} is {getattr(found, name)} there, which {size} {getattr(geometry, name)} here does not take"
              for name, size, too in (("vocab_size", "a smaller", found.vocab_size > geometry.vocab_size),
                                      ("T", "a larger", found.T < geometry.T)) if too]
    if wrong:
        raise UserError(f"The weights of init_from={str(source)!r} do not fit the model: {'; '.join(wrong)}: change"
                        " these settings.")
    padding = tensors["wte.weight"].mean(0, keepdim=True).expand(geometry.vocab_size - found.vocab_size, -1)
    return {**tensors, "wte.weight": torch.cat([tensors["wte.weight"], padding]),
            "wpe.weight": tensors["wpe.weight"][:geometry.T].contiguous()}


def read(source: str | Path) -> tuple:
    """({our name: fp32 tensor}, config) of a folder or a safetensors file with its config.json beside it."""
    source = Path(source)
    file = source if source.suffix == ".safetensors" else source / WEIGHTS
    config = file.with_name(CONFIG)
    try:
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        return from_gpt2(tensors), json.loads(config.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{source} is no exported model: {error.filename or file} is missing; give a folder with"
                        f" {WEIGHTS} and {CONFIG}.") from None
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is no exported model: {WEIGHTS} or {CONFIG} cannot be read ({error}).") from None


def from_gpt2(tensors: dict) -> dict:
    """{GPT-2's name: tensor} -> {our name: tensor}; our own names pass through unchanged."""
    if any(name.startswith("blocks.") for name in tensors):
        return tensors
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    plain.pop("lm_head.weight", None)
    return {name.replace("h.", "blocks.", 1) if name.startswith("h.") else name:
            tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor for name, tensor in plain.items()}


def exported_geometry(tensors: dict, config: dict, source: str | Path) -> GPTConfig:
    """Of either config.json; raises UserError for a model of another kind, and for variants that we do not compute."""
    if "geometry" in config:
        return GPTConfig(**config["geometry"])
    config = {**config, "n_inner": config.get("n_inner") or 4 * config.get("n_embd", 0)}
    standard = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
                "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True,
                "n_inner": 4 * config.get("n_embd", 0)}
    wrong = [f"{name}={config.get(name, value)!r} instead of {value!r}" for name, value in standard.items()
             if config.get(name, value) != value]
    if wrong or "wte.weight" not in tensors:
        raise UserError(f"{source} is no GPT-2 as this code computes it: {', '.join(wrong) or 'it has no wte.weight'}.")
    return GPTConfig(vocab_size=config["vocab_size"], T=config["n_positions"], n_layer=config["n_layer"],
                     n_head=config["n_head"], n_embd=config["n_embd"], dropout=config.get("resid_pdrop", 0.0),
                     qk_norm=False)


def main(arguments: list | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a run folder (its newest good checkpoint is taken) or a checkpoint folder")
    parser.add_argument("--out", required=True, help="a new folder")
    parser.add_argument("--format", default="auto", help="auto, gpt2, plain")
    parser.add_argument("--vocab_size", type=int, default=0, help="rows to keep; 0: those that the data uses")
    options = parser.parse_args(arguments)
    export(options.source, options.out, options.format, options.vocab_size)


if __name__ == "__main__":
    run_main(main)
