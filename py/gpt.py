"""A GPT that computes the same function on TPU, GPU and CPU.

GPT-2's geometry (learned positions, LayerNorm before each sub-block, biases, GELU) with three changes that train better:
queries and keys are normalised, the projections that write into the residual stream start at zero, and the embedding is
also the output head (one tensor, used twice through F.linear, so there is no tie that a device move could break).

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads of D = C / H, V = vocab_size.
"""
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 50304
    T: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    qk_norm: bool = True


class LayerNorm(nn.LayerNorm):
    """LayerNorm in fp32 whatever the autocast around it says."""

    def forward(self, x):
        if x.device.type != "xla":
            return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)
        # Written out, XLA fuses it with its neighbours; torch_xla's own would be a batch norm between reshapes.
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def rms_normalise(x, eps: float = 1e-6):
    """(..., D) scaled to root mean square 1, in fp32, returned in x's dtype. Arithmetic only: XLA fuses it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_attention(q, k, v, dropout: float, training: bool):
    """Causal attention written out, (B, H, T, D) each. The softmax is in fp32. For XLA, which fuses it itself."""
    T, D = q.shape[-2:]
    scores = (q @ k.transpose(-2, -1)).float() * (1.0 / math.sqrt(D))
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1).to(v.dtype)
    return F.dropout(weights, dropout, training) @ v


def fused_attention(q, k, v, dropout: float, training: bool):
    """The same function by torch's fused kernels, for GPU and CPU. On XLA it would be taken apart, and slower."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout if training else 0.0, is_causal=True)


def attention_for(device_type: str):
    return plain_attention if device_type == "xla" else fused_attention


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.attention, self.joint = config, fused_attention, None
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):                                                   # (B, T, C)
        B, T, C = x.shape
        if self.joint:
            return self.c_proj(self.joint(self.c_attn(x), self.config.n_head, self.config.qk_norm))
        q, k, v = (part.view(B, T, self.config.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(C, dim=-1))
        if self.config.qk_norm:
            q, k = rms_normalise(q), rms_normalise(k)
        y = self.attention(q, k, v, self.config.dropout, self.training)    # (B, H, T, D)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = LayerNorm(config.n_embd), MLP(config)
        self.dropout = config.dropout

    def forward(self, x):
        x = x + F.dropout(self.attn(self.ln_1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class GPT(nn.Module):
    """tokens (B, T) of any integer type -> logits (B, T, V) in fp32, or the mean cross-entropy when targets are given."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, self.checkpoint = config, None
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.T, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd)
        self.apply(_initialise)
        for block in self.blocks:               # every block starts as the identity
            nn.init.zeros_(block.attn.c_proj.weight)
            nn.init.zeros_(block.mlp.c_proj.weight)

    def use(self, attention, checkpoint=None, joint=None) -> None:
        """Fit the model to its device: `plain_attention` or `fused_attention`, the same function at different speeds.

        joint: (B, T, 3C) queries, keys and values side by side -> (B, T, C), in place of `attention`; for kernels.
        checkpoint: a function that runs a block and recomputes it in the backward pass; None keeps the activations.
        """
        self.checkpoint = checkpoint
        for block in self.blocks:
            block.attn.attention, block.attn.joint = attention, joint

    def attention_name(self) -> str:
        return (self.blocks[0].attn.joint or self.blocks[0].attn.attention).__name__

    def forward(self, tokens, targets=None):
        T = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))     # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        if x.device.type == "xla" and torch.is_autocast_enabled("xla"):
            x = x.to(torch.get_autocast_dtype("xla"))       # the residual stream too: half the memory traffic of a step
        for block in self.blocks:
            x = self.checkpoint(block, x) if self.checkpoint and self.training else block(x)
        h = self.ln_f(x)
        logits = F.linear(h, self.wte.weight).float()                              # (B, T, V)
        if targets is None:
            return logits
        near = (h.detach() * F.embedding(targets, self.wte.weight.detach())).sum(-1) if x.device.type == "xla" else None
        return token_losses(logits, targets, near).mean()


def token_losses(logits, targets, near=None):
    """(B, T, V), (B, T) -> (B, T) cross-entropies in nats.

    On XLA the target's logit is picked by a comparison that shares a pass over the logits with the sum of exponentials;
    F.cross_entropy would write all log-probabilities first and read them again.

    near: (B, T), the target's logits as far as one can know them before all logits are there, for XLA. The sum of
    exponentials needs a number to subtract that keeps it in fp32's range. The largest logit is the usual one, and
    finding it takes a pass of its own; with this one everything is done where the product that makes the logits ends.
    """
    if logits.device.type != "xla":
        return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none").view(targets.shape)
    chosen = torch.arange(logits.shape[-1], device=logits.device, dtype=targets.dtype) == targets[..., None]
    picked = torch.where(chosen, logits, 0.0).sum(-1)
    if near is None:
        return torch.logsumexp(logits, -1) - picked
    shift = near + ROOM
    return torch.exp(logits - shift[..., None]).sum(-1).log() + (shift - picked)


# In nats. The target's own term is e^-40, so the sum is never 0; terms that fp32 takes for 0 are e^-47 of it or less; and
# it overflows where a token's loss is above 128, against the 10.8 of a model that knows nothing: the loss is then inf.
ROOM = 40.0


# The embedding is read through a LayerNorm, so its scale matters only for the head: at 0.02 (GPT-2's) a token whose blocks
# are still the identity would predict itself with probability one half, and the first loss would be far from ln V.
EMBEDDING_STD, WEIGHT_STD = 0.006, 0.02


def _initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=WEIGHT_STD)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)


def flops_per_token(config: GPTConfig) -> float:
    """Training flops a token, forward and backward: 6 N + 12 L C T (PaLM, arXiv 2204.02311, appendix B).

    N counts the matrices that are multiplied: blocks and head, not the position table. Recomputation is not counted.
    """
    matrices = 12 * config.n_layer * config.n_embd ** 2 + config.vocab_size * config.n_embd
    return 6 * matrices + 12 * config.n_layer * config.n_embd * config.T


@torch.no_grad()
def generate(model: GPT, tokens, new_tokens: int, allowed: int, temperature: float = 0.8, top_k: int = 50,
             generator: torch.Generator | None = None):
    """Continue each row of tokens (B, t) by `new_tokens` sampled ones; returns (B, t + new_tokens), int64, on the CPU.

    allowed: ids at or above it are never drawn (the vocabulary is padded). Runs where the model is; meant for the CPU,
    since on XLA every new length would be a new program.
    """
    model.eval()
    tokens = tokens.long()
    for _ in range(new_tokens):
        logits = model(tokens[:, -model.config.T:])[:, -1, :allowed] / temperature
        floor = torch.topk(logits, min(top_k, allowed)).values[:, -1:]
        probabilities = F.softmax(logits.masked_fill(logits < floor, float("-inf")), dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return tokens
