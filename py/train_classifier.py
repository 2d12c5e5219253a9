"""Fine-tune a Hugging Face model to tell texts apart: any sequence classifier of `transformers`, by name or folder.

    python py/train_classifier.py                                                   # a small one, built on the spot
    python py/train_classifier.py --preset bert-base --data reviews.csv --model google-bert/bert-base-uncased

or, from a notebook:

    config = train_classifier.make_config(data="reviews.csv")
    train_classifier.launch(config, platform, train_classifier.build_model(config))

Everything the run produces lies in its run folder: log.jsonl, curve.png, confusion.png, mistakes.txt, predictions.npz,
config.json, and model/, which `transformers` loads.
"""
import copy
import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import runtime as rt

if __name__ == "__main__":
    rt.set_thread_variables()       # torch reads them when it is imported

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import checkpoint as ckpt
import settings as template_settings
import telemetry
import text_data
from classification import confusion_matrix, draw_confusion, eval_loader, evaluate, train_loader
from compile_guard import CompileGuard
from optimizer import adamw, decay_groups, set_learning_rate, warmup_cosine
from runtime import UserError
from settings import check_ranges, check_types, require, require_equal_shares

SMALL = "small"         # the model that is built on the spot


@dataclass(frozen=True)
class ClassifierConfig:
    """Every setting of a run. The defaults are BERT-base, for a TPU v5e-8."""
    data: str = "docstrings"            # a csv, tsv or jsonl file with text and label; docstrings: on every machine
    test_data: str = ""                 # a file too; "": a fifth of data is held out
    model: str = "google-bert/bert-base-uncased"    # a name on the Hub, a folder, or small: built here, no network
    run_folder: str = "runs/classifier"     # everything the run produces; an existing run is never overwritten

    T: int = 128                        # tokens of a text: every text is filled up or cut to this length
    batch: int = 256                    # texts per optimizer step, over all devices; the evaluation takes the same
    epochs: int = 3                     # the learning rate ends here
    learning_rate: float = 5e-5         # the peak, after warm-up
    warmup_fraction: float = 0.1        # of all steps
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    seed: int = 1337                    # new weights, order and dropout follow from it

    log_every: int = 20                 # optimizer steps; evaluated after every epoch

    # where it runs
    platform: str = "auto"              # auto, tpu, gpu, cpu, xla-cpu, virtual-tpu
    processes: int = 0                  # 0: all devices of the platform
    precision: str = "auto"             # auto: bf16 on TPU and recent GPUs, fp16 on a T4, fp32 on a CPU

    def __post_init__(self):
        check_types(self)
        check_ranges(self, {8: ("T",), 1: ("batch", "epochs", "log_every"), 0: ("weight_decay", "seed", "processes")})
        require(self.learning_rate > 0, f"learning_rate={self.learning_rate} must be above 0.")
        require(self.clip_norm > 0, f"clip_norm={self.clip_norm} must be above 0.")
        require(0 <= self.warmup_fraction < 1,
                f"warmup_fraction={self.warmup_fraction} must be at least 0 and below 1.")


PRESETS = {
    "bert-base": {},
    # A model of 0.8 million parameters, a minute on two CPU cores.
    "small": dict(model=SMALL, T=32, batch=64, epochs=3, learning_rate=1e-3),
}


def make_config(preset: str = "auto", **settings) -> ClassifierConfig:
    """A ClassifierConfig from a preset and settings that replace parts of it; 'auto': BERT except on a CPU."""
    if preset == "auto":
        preset = "bert-base" if rt.detect_platform(settings.get("platform", "auto")).name in ("tpu", "gpu") else "small"
    return template_settings.make_config(ClassifierConfig, PRESETS, preset, settings)


# ---- the model and its tokens ----------------------------------------------------------------------------------------

@functools.cache
def load_tokenizer(config: ClassifierConfig):
    """The model's own tokenizer, or for 'small' one that is learned from the training texts in seconds."""
    from transformers import AutoTokenizer
    if config.model == SMALL:
        return learn_tokenizer(text_data.load(config.data, config.test_data)[0].texts)
    return from_hub(AutoTokenizer, config.model)


def learn_tokenizer(texts, vocab_size: int = 4096):
    """A WordPiece tokenizer as BERT's, with the words of these texts."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast
    learner = BertWordPieceTokenizer(lowercase=True)
    learner.train_from_iterator(texts, vocab_size=vocab_size, show_progress=False)
    return BertTokenizerFast(tokenizer_object=learner._tokenizer)


def build_model(config: ClassifierConfig):
    """The sequence classifier on the CPU, fp32; its new weights are a function of the seed.

    Build it once, before the launch, and give it to `launch`: forked workers then share its memory.
    """
    import transformers
    names = text_data.load(config.data, config.test_data)[0].names
    labels = dict(num_labels=len(names), id2label=dict(enumerate(names)),
                  label2id={name: number for number, name in enumerate(names)})
    torch.manual_seed(rt.mix_seed(config.seed))
    register_attention()
    if config.model == SMALL:
        geometry = transformers.BertConfig(
            vocab_size=len(load_tokenizer(data_config(config))), hidden_size=128, num_hidden_layers=2,
            num_attention_heads=2, intermediate_size=256, max_position_embeddings=config.T,
            attn_implementation=ATTENTION, **labels)
        return transformers.BertForSequenceClassification(geometry)
    model = from_hub(transformers.AutoModelForSequenceClassification, config.model, dtype=torch.float32,
                     attn_implementation=ATTENTION, **labels)
    longest = getattr(model.config, "max_position_embeddings", config.T)
    require(config.T <= longest, f"T={config.T} is more than the {longest} tokens that {config.model} takes: use a"
            " smaller T.")
    return model


ATTENTION = "whole_mask"


def register_attention() -> None:
    """Teach transformers an attention that always takes the whole mask, by its own interface for this.

    Its own ways leave the mask out of a batch without any filling. They ask the device in every forward pass, and when
    one rank's batch has no filling, that rank runs another program than the others: on a TPU all wait for ever.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    AttentionInterface.register(ATTENTION, attention_with_whole_mask)
    AttentionMaskInterface.register(ATTENTION, whole_mask)


def whole_mask(*arguments, **named):
    """(B, 1, T, T) bool, True where a token may look; never left out."""
    from transformers.masking_utils import sdpa_mask
    return sdpa_mask(*arguments, **{**named, "allow_is_bidirectional_skip": False, "allow_is_causal_skip": False})


def attention_with_whole_mask(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    """(B, heads, T, d), keys and values with as many heads or fewer -> (B, T, heads, d), weights. Softmax in fp32."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~attention_mask, torch.finfo(torch.float32).min).softmax(-1).to(value.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def from_hub(kind, name: str, **options):
    """kind.from_pretrained(name), whose many ways to fail become one sentence."""
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:      # no such folder, no network, a kind of model without a classifier, a damaged file
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise UserError(f"model={name!r} cannot be loaded ({reason}): give the folder of a model that transformers"
                        " saved, its name on the Hub with the session's Internet switched on, or model='small'.") from None


class Texts(Dataset):
    """Batches of a TextSet as tokens, all of length T."""

    def __init__(self, text_set: text_data.TextSet, tokenizer, T: int):
        encoded = tokenizer(list(text_set.texts), padding="max_length", truncation=True, max_length=T,
                            return_tensors="np")
        self.arrays = dict(input_ids=encoded["input_ids"].astype(np.int32),
                           attention_mask=encoded["attention_mask"].astype(np.int32), labels=text_set.labels)

    def __len__(self) -> int:
        return len(self.arrays["labels"])

    def __getitems__(self, rows: list) -> dict:
        """{'input_ids': (B, T), 'attention_mask': (B, T), 'labels': (B,)} of a whole batch at once."""
        return {name: torch.from_numpy(array[rows]).long() for name, array in self.arrays.items()}


@functools.cache        # made once, by the process that launches: forked workers share its memory
def load_texts(config: ClassifierConfig) -> tuple[Texts, Texts]:
    tokenizer = load_tokenizer(config)
    return tuple(Texts(part, tokenizer, config.T) for part in text_data.load(config.data, config.test_data))


# ---- the worker ------------------------------------------------------------------------------------------------------

def train_worker(config: ClassifierConfig, model=None) -> None:
    """Train on this rank; every rank runs this very function.

    model: built before the launch and shared by fork, for hosts with little memory; None to build it here.
    """
    runtime = rt.Runtime(config.precision, config.processes)
    train_set, test_set = text_data.load(config.data, config.test_data)
    train_texts, test_texts = load_texts(data_config(config))
    model = runtime.place(model or build_model(config)).train()
    optimizer = adamw(decay_groups(model, config.weight_decay), runtime.is_xla)
    ckpt.load_optimizer(optimizer, model)       # its state now, not inside step one: that would be a program of its own
    runtime.check_replicas(dict(model.named_parameters()), "before the first step")

    batches = train_loader(train_texts, config.batch, runtime, config.seed)
    test_batches = eval_loader(test_texts, config.batch, runtime)
    steps_per_epoch = len(train_texts) // config.batch
    last_step, step = config.epochs * steps_per_epoch, 0
    describe_run(config, runtime, model, train_set, test_set, last_step)

    log, guard = telemetry.RunLog(config.run_folder, runtime.is_main), CompileGuard(runtime)
    peak = telemetry.peak_flops(runtime.device_kind())
    speed = telemetry.Throughput(config.batch, flops_per_text(model, config.T), peak and peak * runtime.world_size,
                                 unit="texts")

    def logits_of(batch):
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    with telemetry.Heartbeat(runtime.is_main) as heartbeat:
        for epoch in range(config.epochs):
            batches.set_epoch(epoch)
            speed.start(step)       # time that is not training is not counted as training
            for batch in batches:
                heartbeat.report(f"step {step + 1}" + (", the first, is compiled: a minute or two on a TPU"
                                                       if runtime.is_xla and step == 0 else ""))
                runtime.seed(config.seed, step, runtime.rank)       # dropout
                rate = warmup_cosine(step, config.learning_rate, int(config.warmup_fraction * last_step), last_step, 0)
                set_learning_rate(optimizer, rate, runtime.device)
                with runtime.autocast():
                    logits = logits_of(batch)
                loss = F.cross_entropy(logits.float(), batch["labels"])
                runtime.scaler.scale(loss).backward()
                norm = runtime.optimizer_step(optimizer, config.clip_norm)
                with guard.watch(step + 1, loss, **batch):
                    runtime.sync()
                step += 1
                if step % config.log_every == 0 or step in (1, last_step):
                    values = runtime.all_reduce(torch.stack([loss.detach(), norm]))
                    mean_loss, mean_norm = runtime.host_values(values)
                    if step == 1:
                        speed.start(step)       # the first step compiles; its time says nothing
                    record = dict(step=step, epoch=epoch + 1, loss=mean_loss, lr=rate, grad_norm=mean_norm,
                                  **speed.read(step, last_step), compiles=runtime.compile_count())
                    log.write(**record)
                    heartbeat.progress(telemetry.progress_line(record, last_step, "texts"))
                    require(math.isfinite(mean_loss), f"The loss is {mean_loss} at step {step}: lower learning_rate.")
            heartbeat.report("evaluating")
            result = evaluate(model, logits_of, test_batches, runtime, len(test_set))
            accuracy = result.accuracy(test_set.labels)
            log.write(step=step, epoch=epoch + 1, val_loss=result.loss, accuracy=accuracy,
                      compiles=runtime.compile_count())
            heartbeat.say(f"epoch {epoch + 1}/{config.epochs}  test loss {result.loss:.4f}  accuracy {accuracy:.2%}")
        heartbeat.report("saving")
        runtime.check_replicas(dict(model.named_parameters()), "at the end")
        if runtime.is_main:
            save(config, model, result)


def data_config(config: ClassifierConfig) -> ClassifierConfig:
    """The part of the settings that decides on the tokens, so that workers find what the launching process made."""
    return ClassifierConfig(data=config.data, test_data=config.test_data, model=config.model, T=config.T)


def flops_per_text(model, T: int) -> float:
    """Training flops of a text, forward and backward: 6 N T, N the weights that are multiplied (not the tables)."""
    tables = {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Embedding)}
    return 6.0 * T * sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in tables)


def describe_run(config: ClassifierConfig, runtime: rt.Runtime, model, train_set, test_set, last_step: int) -> None:
    commonest = np.bincount(test_set.labels).max() / len(test_set)
    runtime.print(
        f"model: {type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters,"
        f" {len(train_set.names)} classes\n"
        f"device: {runtime.world_size} x {runtime.device_kind()}; weights and optimizer state fp32, matrix work"
        f" {runtime.precision}, loss fp32\n"
        f"data: {train_set.source}, {len(train_set):,} training and {len(test_set):,} test texts of {config.T} tokens;"
        f" the commonest class alone would be right {commonest:.1%} of the time\n"
        f"batch: {config.batch} texts = {config.batch // runtime.world_size} x {runtime.world_size} processes, in"
        f" training and in evaluation; {config.epochs} epochs, {last_step} steps")


def save(config: ClassifierConfig, model, result) -> None:
    """model/ with the tokenizer, for `from_pretrained`, and what it says of each test text. On the main process."""
    folder = Path(config.run_folder)
    tensors = {name: ckpt.host_copy(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder / ".partial_model", state_dict=tensors)
    load_tokenizer(data_config(config)).save_pretrained(folder / ".partial_model")
    os.replace(folder / ".partial_model", folder / MODEL_FOLDER)
    np.savez(folder / PREDICTIONS, predicted=result.predicted, losses=result.losses)


MODEL_FOLDER, PREDICTIONS, MISTAKES = "model", "predictions.npz", "mistakes.txt"


# ---- the parent ------------------------------------------------------------------------------------------------------

def launch(config: ClassifierConfig, platform: rt.Platform | None = None, model=None) -> Path:
    """Check everything, train on all devices, show the results. Returns the run folder.

    model: from `build_model`, to be shared by the workers; without one each builds its own. Raises UserError before any
    process starts and before anything is written when a setting or the data cannot work.
    """
    platform = platform or rt.patch_environment(config.platform)
    config = dataclasses.replace(config, processes=rt.resolve_processes(platform, config.processes))
    train_set, test_set = text_data.load(config.data, config.test_data)
    check_batch(config, train_set)
    load_texts(data_config(config))
    if model is not None and platform.in_process:
        model = copy.deepcopy(model)        # there the worker is this process, and would train the caller's own
    config = dataclasses.replace(config, run_folder=str(ckpt.unused_run_folder(config.run_folder)))
    folder = Path(config.run_folder)
    is_main = rt.outer_launch()[1] == 0
    with ckpt.run_of(config, is_main):
        rt.launch(train_worker, (config, model), platform, config.processes)
        if is_main:
            show_result(folder, test_set)
    return folder


def check_batch(config: ClassifierConfig, train_set) -> None:
    require_equal_shares(config.batch, config.processes)
    require(config.batch <= len(train_set), f"batch={config.batch} is more than the {len(train_set):,} training texts:"
            f" use a smaller one.")


def show_result(folder: Path, test_set: text_data.TextSet) -> None:
    """Draw the curve and the confusion matrix, list the mistakes; print the accuracy and where everything lies."""
    predicted, losses = (np.load(folder / PREDICTIONS)[name] for name in ("predicted", "losses"))
    matrix = confusion_matrix(test_set.labels, predicted, len(test_set.names))
    right = int(np.trace(matrix))
    telemetry.draw_curve(folder, unit="nats per text")
    draw_confusion(folder, matrix, test_set.names, f"{test_set.source}: {right:,} of {len(test_set):,} right")
    wrong = np.flatnonzero(predicted != test_set.labels)
    worst = wrong[np.argsort(-losses[wrong])]
    true, taken = ([test_set.names[label] for label in labels[worst]] for labels in (test_set.labels, predicted))
    lines = [f"{one}, taken for {other}: {test_set.texts[row]}" for one, other, row in zip(true, taken, worst)]
    (folder / MISTAKES).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("the mistakes with the largest loss:\n" + "".join(f"  {line[:150]}\n" for line in lines[:8])
          + f"test accuracy: {right / len(test_set):.2%}, {right:,} of {len(test_set):,} texts, each counted once;"
          f" the commonest class alone {matrix.sum(1).max() / len(test_set):.2%}\n"
          f"run folder: {folder}\n  {MODEL_FOLDER}/ for transformers, log {telemetry.LOG_NAME}, {PREDICTIONS},"
          f" {MISTAKES}, pictures {telemetry.CURVE_NAME}, confusion.png")


def main(arguments: list | None = None) -> None:
    settings = template_settings.settings_from_command_line(ClassifierConfig, PRESETS, __doc__, arguments)
    platform = rt.patch_environment(settings.get("platform", "auto"))
    config = make_config(**settings)
    launch(config, platform, build_model(config))


if __name__ == "__main__":
    rt.run_main(main)
