"""What the TPU's own compiler says about the presets on a v5e-8: does it fit, how fast would it be. No TPU was used.

The table is written by bench/compile_estimates.py; nothing is compiled here. The compiler does not time the attention
kernels: their share, kernel_ms, is the flops of the blocks that they compute at an assumed 60 % of the peak, 30 % with
heads of 64.
"""

TABLE = {
    "gpt2-124m": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=4, fits=True, peak_gib=4.18,
        date='2026-11-30', libtpu='0.0.21', step_ms=576.6, kernel_ms=136.0, tokens_per_second=909294, mfu=0.4931),
    "gpt2-124m, attention written out": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=4, fits=True, peak_gib=6.53,
        date='2026-11-30', libtpu='0.0.21', step_ms=1062.9, kernel_ms=0.0, tokens_per_second=493251, mfu=0.2675),
    "gpt2-124m-tpu": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=4, fits=True, peak_gib=4.14,
        date='2026-11-30', libtpu='0.0.21', step_ms=506.5, kernel_ms=68.0, tokens_per_second=1035079, mfu=0.5613),
    "gpt2-124m-tpu, attention written out": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=4, fits=True, peak_gib=5.46,
        date='2026-11-30', libtpu='0.0.21', step_ms=741.1, kernel_ms=0.0, tokens_per_second=707434, mfu=0.3836),
    "the guides' recipe, micro_batch 16": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=16, fits=True, peak_gib=12.01,
        date='2026-11-30', libtpu='0.0.21', step_ms=1162.5, kernel_ms=0.0, tokens_per_second=451014, mfu=0.2446),
    "the guides' recipe, micro_batch 32": dict(
        chip='v5e-8', tokens_per_step=524288, micro_batch=32, fits=False, peak_gib=16.01,
        date='2026-11-30', libtpu='0.0.21'),
}


def text(table: dict = TABLE) -> str:
    """The table in lines to print."""
    lines = ["estimates of the TPU compiler for a v5e-8, not measurements", "",
             f"{'':38}{'fits':>5}{'peak GiB':>10}{'ms a step':>11}{'tokens/s':>11}{'MFU':>8}"]
    for name, row in table.items():
        speed = f"{row['step_ms']:11,.1f}{row['tokens_per_second']:11,}{row['mfu']:8.1%}" if "step_ms" in row else ""
        lines.append(f"{name:38}{'yes' if row['fits'] else 'NO':>5}{row['peak_gib']:10.2f}{speed}")
    return "\n".join(lines)
