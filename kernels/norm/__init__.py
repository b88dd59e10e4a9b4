"""RMS norm of rows, and the head's logits of one token, each in one kernel. Owns no memory: outputs are the caller's.

On a CPU the definitions in reference.py run.
"""

from __future__ import annotations

import triton
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, expect
from kernels.norm.kernel import head_kernel, rms_norm_kernel
from kernels.norm.reference import head_reference, rms_norm_reference
from kernels.tuning import Config, choose

MAX_WIDTH = 16_384  # a program holds its row in registers
HEAD_BLOCK = 256  # columns a warp reads of a row at a time; it fixes the order of the sums
HEAD_CANDIDATES: tuple[Config, ...] = tuple({"ROWS": rows} for rows in (2, 4, 1))  # rows of one warp


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Tensor:
    """weight * x / sqrt(mean(x²) + eps) over the last dimension in `out`, float32 inside.

    Args:
        x: [..., D] bfloat16 or float32, contiguous; or [R, D] with contiguous rows any stride apart. D up to 16,384.
        weight: [D], or None for ones.
        eps: Added to the mean square.
        out: x's shape, contiguous, bfloat16 or float32; may be x.

    Raises:
        ValueError: A shape, dtype, device or layout is not as said here.
    """
    _check_norm(x, weight, out)
    return launch_rms_norm(x, weight, eps, out) if x.is_cuda else out.copy_(rms_norm_reference(x, weight, eps))


def head(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Logits of one token, float32 [V] in `out`: weight · x with float32 sums.

    Args:
        x: [D], contiguous, bfloat16 or float32.
        weight: [V, D], contiguous, bfloat16 or float32.
        out: [V] float32.

    Raises:
        ValueError: A shape, dtype, device or layout is not as said here.
    """
    _check_head(x, weight, out)
    return launch_head(x, weight, out) if x.is_cuda else out.copy_(head_reference(x, weight))


def launch_rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> Tensor:
    """rms_norm by the kernel, unchecked."""
    width = x.shape[-1]
    rows, stride = x.numel() // width, x.stride(0) if x.ndim == 2 else width
    block = triton.next_power_of_2(width)
    if rows:
        rms_norm_kernel[(rows,)](x, weight, out, stride, eps, width, block, num_warps=norm_warps(block))
    return out


def norm_warps(block: int) -> int:
    """Warps of a row of `block`: eight values a thread, one load each, up to 16 warps."""
    return min(max(block // 256, 1), 16)


def launch_head(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """head by the kernel, unchecked."""
    vocab, hidden = weight.shape
    key = f"head-{vocab}x{hidden}-{weight.element_size()}"

    def launch(config: Config) -> None:
        launch_head_with(config, x, weight, out)

    launch(choose("norm", key, HEAD_CANDIDATES, launch, x.device))
    return out


def launch_head_with(config: Config, x: Tensor, weight: Tensor, out: Tensor) -> None:
    """head by the kernel in one configuration; all give the same bits."""
    vocab, hidden = weight.shape
    grid = (triton.cdiv(vocab, config["ROWS"]),)
    head_kernel[grid](x, weight, out, vocab, hidden, config["ROWS"], HEAD_BLOCK, num_warps=1)


def _check_norm(x: Tensor, weight: Tensor | None, out: Tensor) -> None:
    width = x.shape[-1] if x.ndim else 0
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(
            f"rms_norm: x has shape {list(x.shape)}, expected a last dimension of 1 to {MAX_WIDTH}; cut it"
        )
    row = x[:1] if x.ndim == 2 else x  # rows may lie apart
    expect("rms_norm", "x", row, tuple(row.shape), FLOATS, x.device)
    expect("rms_norm", "out", out, tuple(x.shape), FLOATS, x.device)
    if weight is not None:
        expect("rms_norm", "weight", weight, (width,), FLOATS, x.device)


def _check_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    expect("head", "weight", weight, ("V", "D"), FLOATS, x.device)
    vocab, hidden = weight.shape
    if not weight.numel():
        raise ValueError(
            f"head: weight has shape {list(weight.shape)}, expected [V, D] that is not empty; load it first"
        )
    expect("head", "x", x, (hidden,), FLOATS, x.device)
    expect("head", "out", out, (vocab,), FLOAT32, x.device)
