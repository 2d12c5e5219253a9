"""GPT-2 124M as the TPU guides for Kaggle write it, as the baseline of the estimates. Not a recipe to follow.

    python py/preflight.py --template bench/guides_recipe.py --chip v5e-8 --micro_batch 16

All tensors are bf16 (`XLA_USE_BF16`, which Accelerate's mixed_precision='bf16' sets on a TPU), attention is written out,
the loss is F.cross_entropy on all logits, LayerNorm is torch's, a block is as in GPT-2. Reduction, clipping and the
program a micro-step are this project's, which is kinder to the baseline than the guides are.
"""
import math
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import gpt
import runtime as rt


@dataclass(frozen=True)
class Config:
    """The settings that the command line may change."""
    micro_batch: int = 16
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    T: int = 1024
    vocab_size: int = 50304
    tokens_per_step: int = 524288


class Block(nn.Module):
    def __init__(self, C: int, n_head: int):
        super().__init__()
        self.n_head, self.ln_1, self.ln_2 = n_head, nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.attn_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.c_fc, self.mlp_proj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
        return self.attn_proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GuidesGPT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.T, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config.n_embd, config.n_head) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        logits = F.linear(self.ln_f(self.blocks(x)), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_worker(config: Config) -> None:
    runtime = rt.Runtime("fp32")
    os.environ["XLA_USE_BF16"] = "1"        # torch_xla still reads it when the first tensor is made
    model = GuidesGPT(config).to(runtime.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(6e-4), capturable=True, foreach=False)
    for p in model.parameters():            # AdamW would create its state in the first step, which would be one of its own
        optimizer.state[p] = dict(step=torch.tensor(0.0).to(p.device), exp_avg=torch.zeros(p.shape).to(p.device),
                                  exp_avg_sq=torch.zeros(p.shape).to(p.device))
    runtime.sync()
    micro_steps = config.tokens_per_step // (config.T * config.micro_batch * runtime.world_size)
    while True:
        for p in model.parameters():        # the first micro-step is then the same program as the others
            p.grad = torch.zeros_like(p)
        for _ in range(micro_steps):
            tokens = torch.zeros(config.micro_batch, config.T + 1, dtype=torch.int64).to(runtime.device)
            (model(tokens[:, :-1], tokens[:, 1:]) / micro_steps).backward()
            runtime.sync()
        runtime.optimizer_step(optimizer, 1.0)
        runtime.sync()


def template(settings: dict, chip, folder) -> tuple:
    """What the preflight asks a template for: its worker, the worker's arguments, and facts for the table."""
    config = Config(**settings)
    at_once = config.micro_batch * chip.replicas * config.T
    if config.tokens_per_step % at_once:
        raise rt.UserError(f"micro_batch={config.micro_batch} does not share out {config.tokens_per_step} tokens.")
    geometry = gpt.GPTConfig(config.vocab_size, config.T, config.n_layer, config.n_head, config.n_embd)
    return train_worker, (config,), dict(
        tokens_per_step=config.tokens_per_step, flops_per_token=gpt.flops_per_token(geometry), micro_batch=config.micro_batch,
        micro_steps=config.tokens_per_step // at_once, T=config.T, n_layer=config.n_layer, n_head=config.n_head,
        n_embd=config.n_embd, vocab_size=config.vocab_size)
