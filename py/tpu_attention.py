"""Causal attention for the TPU by JAX's Pallas kernels (splash attention), as one operation of a torch_xla program.

The whole core of an attention layer, from the joint projection to the heads' outputs side by side, is a JAX function. It
is lowered once for its shape and then used by every layer: fewer operations for Python to trace, and no T x T matrix in
memory. JAX never touches the device: it stays on its own CPU backend and only lowers, for the platform that is named.

    attend = tpu_attention.choose(runtime, B=8, T=1024, C=768, n_head=12, qk_norm=True, dropout=0.0)
    y = attend(qkv, 12, True)                       # (B, T, 3C) in bf16 -> (B, T, C); attend is None where it cannot serve
"""
import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os

import runtime as rt

MOSAIC_FORMAT = 4       # of a kernel's serialized form: libtpu 0.0.17 reads no newer one, 0.0.21 up to 7, both all older ones
BLOCK = 512             # queries and keys that a kernel takes at a time; the blocks above the diagonal are left out


def choose(runtime: rt.Runtime, B: int, T: int, C: int, n_head: int, qk_norm: bool, dropout: float):
    """`joint_attention` after one trial on this chip; None where it does not work, with the reason in one line.

    All ranks must call it, and all get the same answer: with kernels on one rank and none on another they would hang.
    """
    if not runtime.is_xla or runtime.device_kind() == "cpu":
        return None
    reason = why_not(T, C // n_head, dropout)
    if not reason and runtime.precision != "bf16":
        reason = f"the kernels work in bf16, not in {runtime.precision}"
    reason = reason or trial(runtime, (B, T, 3 * C), n_head, qk_norm)
    if not runtime.host_values(runtime.all_reduce(runtime.number(bool(reason)), "max"))[0]:
        return joint_attention
    runtime.print(f"attention: written out instead of the TPU's kernels, slower, because {reason or 'a rank has no kernels'}")
    return None


def trial(runtime: rt.Runtime, shape: tuple, n_head: int, qk_norm: bool) -> str | None:
    """Run the kernels once, forward and backward. What went wrong in a few words, or None."""
    import torch
    try:
        qkv = torch.zeros(shape, dtype=torch.bfloat16).to(runtime.device).requires_grad_()
        joint_attention(qkv, n_head, qk_norm).float().sum().backward()
        runtime.host_values(qkv.grad.float().sum().view(1))
    except Exception as error:      # whatever goes wrong in an image's JAX or libtpu must not end the run
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return None


def why_not(T: int, head_size: int, dropout: float) -> str | None:
    """What keeps the kernels from serving this model, in a few words; None when nothing does."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed"
    if dropout:
        return "the kernels have no dropout"
    if T % min(BLOCK, T) or T % 128:
        return f"T={T} is not a multiple of {BLOCK if T > BLOCK else 128}"
    narrowest = narrowest_heads()
    if head_size % narrowest:
        return f"heads of {head_size} channels are not a multiple of {narrowest}" + (
            ", which JAX before 0.7 wants" if narrowest > 64 else "")
    return None


def narrowest_heads() -> int:
    """Channels of a head that the installed JAX's kernels serve: its forward kernel had no lanes left empty before 0.7."""
    major, minor = (int(number) for number in importlib.metadata.version("jax").split(".")[:2])
    return 64 if (major, minor) >= (0, 7) else 128


def joint_attention(qkv, n_head: int, qk_norm: bool, interpret: bool = False):
    """(B, T, 3C) queries, keys and values of all heads side by side -> (B, T, C), in bf16.

    interpret: run the kernels as plain operations, for tests on a CPU; slow.
    """
    return _function().apply(qkv, n_head, qk_norm, interpret)


@functools.cache
def _function():
    import torch

    class JointAttention(torch.autograd.Function):
        @staticmethod
        def forward(context, qkv, n_head, qk_norm, interpret):
            context.key = (tuple(qkv.shape), n_head, qk_norm, interpret)
            y, *saved = lowered(*context.key)[0](qkv)
            context.save_for_backward(*saved)
            return y

        @staticmethod
        def backward(context, gradient):
            return lowered(*context.key)[1](*context.saved_tensors, gradient)[0], None, None, None

    return JointAttention


@functools.cache
def lowered(shape: tuple, n_head: int, qk_norm: bool, interpret: bool) -> tuple:
    """Two functions on XLA tensors: forward, qkv -> y and what the backward pass needs; backward, that and dy -> dqkv."""
    os.environ["JAX_PLATFORMS"] = "cpu"         # JAX would take the TPU from torch_xla
    import jax
    import jax.numpy as jnp
    core, tree = attention_core(shape, n_head, qk_norm, interpret), None

    def forward(qkv):
        nonlocal tree
        y, pull_back = jax.vjp(core, qkv)
        leaves, tree = jax.tree.flatten(pull_back)
        return (y, *leaves)

    def backward(*leaves_and_gradient):
        *leaves, gradient = leaves_and_gradient
        return jax.tree.unflatten(tree, leaves)(gradient)

    B, T, width = shape
    qkv, y = (jax.ShapeDtypeStruct((B, T, w), jnp.bfloat16) for w in (width, width // 3))
    leaves = jax.eval_shape(forward, qkv)[1:]
    platform = "cpu" if interpret else "tpu"
    return as_operation(platform, forward, qkv), as_operation(platform, backward, *leaves, y)


def attention_core(shape: tuple, n_head: int, qk_norm: bool, interpret: bool):
    """The JAX function (B, T, 3C) -> (B, T, C): normalise queries and keys, attend, put the heads side by side again."""
    import jax
    import jax.numpy as jnp
    B, T, C = shape[0], shape[1], shape[2] // 3
    D = C // n_head
    attend = jax.vmap(splash_kernel(T, n_head, D, interpret))

    def normalise(x, scale):            # (B, H, D, T)
        wide = x.astype(jnp.float32)
        if qk_norm:
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -2, keepdims=True) + 1e-6)
        return (wide * scale).astype(x.dtype)

    def core(qkv):
        # Tokens come last: they fill the chip's 128 lanes, where the channels of a head of 64 would leave half empty.
        q, k, v = jnp.split(qkv.swapaxes(1, 2).reshape(B, 3 * n_head, D, T), 3, axis=1)
        y = attend(*(x.swapaxes(2, 3) for x in (normalise(q, 1 / math.sqrt(D)), normalise(k, 1.0), v)))
        return y.transpose(0, 2, 1, 3).reshape(B, T, C)

    return core


def backward_keys(T: int) -> int:
    """Keys that the backward kernel takes at a time. For every such block it writes a gradient of all queries of its own.

    Adding two of them costs more than the blocks above the diagonal that one of 1024 computes in vain.
    """
    return 2 * BLOCK if T % (2 * BLOCK) == 0 else min(BLOCK, T)


def blocks_computed(T: int) -> tuple:
    """The share of a T x T score matrix that the forward and the backward kernel compute."""
    def share(queries: int, keys: int) -> float:
        return sum(keys * queries for row in range(0, T, queries) for column in range(0, T, keys)
                   if column < row + queries) / T ** 2
    block = min(BLOCK, T)
    return share(block, block), share(block, backward_keys(T))


def splash_kernel(T: int, n_head: int, head_size: int, interpret: bool):
    """(H, T, D) queries, keys, values -> (H, T, D), causal."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    block, tokens_last = min(BLOCK, T), kernel.QKVLayout.SEQ_MINOR
    sizes = kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block,
                              block_kv_dkv=backward_keys(T), block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
                              q_layout=tokens_last, k_layout=tokens_last, v_layout=tokens_last)
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * n_head)
    return kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes, interpret=interpret)


def as_operation(platform: str, function, *arguments):
    """A JAX function as a function on XLA tensors, lowered now for the platform."""
    import jax
    with old_mosaic():
        lowered = jax.jit(function, keep_unused=True).trace(*arguments).lower(lowering_platforms=(platform,))
    module = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    return rt.xla_operation("attention", module)


@contextlib.contextmanager
def old_mosaic():
    """Let JAX write kernels as the image's libtpu reads them: in an older format, and entered at a function named main.

    JAX has no public setting for it. JAX 0.10 names the function after the kernel.
    """
    from jax._src import tpu_custom_call
    own = tpu_custom_call._lower_mosaic_module_to_asm

    def write(module, **options):
        from jax._src.lib.mlir import ir
        with module.context:
            for operation in module.body.operations:
                if "dimension_semantics" in operation.attributes:
                    operation.attributes["sym_name"] = ir.StringAttr.get("main")
        return own(module, **{**options, "ir_version": MOSAIC_FORMAT})

    tpu_custom_call._lower_mosaic_module_to_asm = write
    try:
        yield
    finally:
        tpu_custom_call._lower_mosaic_module_to_asm = own
