"""Products of activations with FP8-block matrices: plain, grouped, and the SwiGLU half of the shared expert.

Up to DECODE_TOKENS tokens each weight is read once by a kernel that is bound by these bytes; more tokens take a tiled one.
From sm_90 on, a call of few tokens fetches weights before the kernel ahead of it in the stream has ended: only that one
kernel must not write them. Owns no weights and no scratch memory; on a CPU the definitions of `reference.py` run.

NaN in x, and a scale byte of 255, give NaN in the outputs where the definition has them. Not kept on a GPU: E4M3's two NaN
codes, which count as ±480, and values of a float32 x beyond bfloat16's, infinity among them, which give NaN.
"""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
from torch import Tensor

from kernels.card import is_chainable
from kernels.formats import BLOCK_SIZE, Matrix
from kernels.fp8_linear.kernel import decode_kernel, prefill_kernel
from kernels.fp8_linear.reference import fp8_grouped_linear_reference, fp8_linear_reference, fp8_swiglu_reference
from kernels.fp8_linear.stream_kernel import stream_kernel
from kernels.tuning import Config, choose

DECODE_TOKENS = 8
RESERVED_BYTES = 4096  # of a program's shared memory, for all but the pipeline
SHARED_BYTES = 101376 - RESERVED_BYTES  # for the pipeline on the smallest cards, sm_86 and sm_89
FULL_CARD_ROWS = 32768  # rows that give the SMs of a large card enough programs without slices
DTYPES = (torch.bfloat16, torch.float32)


def fp8_linear(x: Tensor, matrix: Matrix, out: Tensor) -> Tensor:
    """`out` [T, N] = x · Wᵀ.

    Args:
        x: [T, K] bfloat16 or float32, contiguous.
        matrix: Codes float8_e4m3fn or uint8 [N, K], E8M0 bytes uint8 [N/128, K/128].
        out: [T, N] bfloat16 or float32, overwritten.

    Raises:
        ValueError: A shape, dtype, device or layout is wrong.
    """
    _check(_one_group(x), (matrix,), _one_group(out))
    if not x.is_cuda:
        return out.copy_(fp8_linear_reference(x, matrix))
    launch_linear(x[:, None], (matrix,), out[:, None])
    return out


def fp8_grouped_linear(x: Tensor, matrix: Matrix, out: Tensor) -> Tensor:
    """`out` [T, G, N]: x[:, g] times the rows g*N … g*N+N-1 of a matrix [G*N, K]; else as `fp8_linear`.

    Args:
        x: [T, G, K].
        matrix: Codes [G*N, K], E8M0 bytes [G*N/128, K/128]; N is a multiple of 128.
        out: [T, G, N], overwritten.
    """
    _check(x, (matrix,), out)
    if not x.is_cuda:
        return out.copy_(fp8_grouped_linear_reference(x, matrix))
    return launch_linear(x, (matrix,), out)


def fp8_swiglu(x: Tensor, w1: Matrix, w3: Matrix, out: Tensor, *, limit: float) -> Tensor:
    """`out` [T, F] = silu(min(W1·x, limit)) * clamp(W3·x, ±limit); x, matrices and errors as in `fp8_linear`."""
    _check(_one_group(x), (w1, w3), _one_group(out))
    if not x.is_cuda:
        return out.copy_(fp8_swiglu_reference(x, w1, w3, limit))
    launch_linear(x[:, None], (w1, w3), out[:, None], limit=limit)
    return out


def launch_linear(
    x: Tensor, matrices: tuple[Matrix, ...], out: Tensor, *, limit: float = 0.0, portable: bool = False
) -> Tensor:
    """Runs the kernels, unchecked: x [T, G, K], one matrix or w1 and w3 of a SwiGLU, out [T, G, N]."""
    if x.shape[0] == 0:
        return out
    run = partial(_launch, x, matrices, out, limit, portable)
    run(choose("fp8_linear", _key(x, matrices, out), candidates(x, matrices), run, x.device))
    return out


def candidates(x: Tensor, matrices: tuple[Matrix, ...]) -> list[Config]:
    """Configurations of equal bits for these inputs; for few tokens SPLIT, which orders the sums, follows from the shape alone."""
    if x.shape[0] > DECODE_TOKENS:
        return _prefill_candidates(x, len(matrices))
    split = _split(matrices[0])
    sizes = ((16, 2, 128), (16, 4, 128), (32, 2, 128), (16, 2, 64), (16, 1, 64))
    names = ("ROWS", "DEPTH", "maxnreg")
    return [dict(zip(names, size, strict=True)) | {"SPLIT": split, "num_warps": split} for size in sizes]


def _prefill_candidates(x: Tensor, matrices: int) -> list[Config]:
    """Tiles for many tokens: no wider than the tokens, by powers of two, and such that the stages fit this card.

    A step adds the two parts of float32 tokens one after the other, so that its columns would order the sums: all have 64.
    """
    widest, limit = min(256, triton.next_power_of_2(x.shape[0])), shared_bytes(x.device)
    widest_step = 64 if x.dtype == torch.float32 else 128
    configs = []
    for rows, tokens, columns, warps, stages in (
        (128, 256, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 128, 128, 8, 3),
        (64, 256, 64, 4, 3),
        (64, 64, 128, 4, 3),
        (64, 32, 128, 4, 3),
        (64, 16, 128, 4, 4),
        (64, 64, 64, 4, 3),
        (64, 32, 64, 4, 3),
        (64, 16, 64, 4, 3),
    ):
        per_step = columns * (rows * matrices + tokens * x.element_size())
        fits = per_step * stages <= limit and rows * tokens * matrices <= 32 * 1024 * warps // 8
        if min(widest // 2, 64) <= tokens <= widest and fits and columns <= widest_step:
            configs.append(_config(ROWS=rows, TOKENS=tokens, COLUMNS=columns, num_warps=warps, num_stages=stages))
    return configs


@cache
def shared_bytes(device: torch.device) -> int:
    """What a program's pipeline may take on this card."""
    if device.type == "cpu":
        return SHARED_BYTES
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]) - RESERVED_BYTES


def _config(**sizes: int) -> Config:
    return sizes


def _split(matrix: Matrix) -> int:
    """Slices along K, one a warp: the fastest on an H200 of 2, 4, 8 and 16 for each of the model's shapes, as a rule."""
    rows, columns = matrix.codes.shape
    wanted = triton.next_power_of_2(triton.cdiv(FULL_CARD_ROWS, rows))
    return max(2, min(wanted, triton.next_power_of_2(columns // BLOCK_SIZE), 8))


def _key(x: Tensor, matrices: tuple[Matrix, ...], out: Tensor) -> str:
    """What the choice depends on; prefill's tokens by powers of two."""
    (tokens, groups, columns), rows = x.shape, matrices[0].codes.shape[0]
    kind = f"{'swiglu' if len(matrices) == 2 else 'linear'} {rows}x{columns} g{groups} {str(x.dtype)[6:]} {str(out.dtype)[6:]}"
    return f"{kind} decode" if tokens <= DECODE_TOKENS else f"{kind} t{triton.next_power_of_2(tokens)}"


def _launch(x: Tensor, matrices: tuple[Matrix, ...], out: Tensor, limit: float, portable: bool, config: Config) -> None:
    """One kernel over all rows (and token tiles) with these sizes."""
    (tokens, groups, columns), rows = x.shape, matrices[0].codes.shape[0]
    weights = [part for matrix in (matrices[0], matrices[-1]) for part in (_bytes(matrix.codes), matrix.scales)]
    arguments = (x, *weights, out, limit, tokens, rows, rows // groups, columns, len(matrices) == 2)
    if tokens <= DECODE_TOKENS and portable:
        sizes = {name: config[name] for name in ("ROWS", "SPLIT", "num_warps")}
        decode_kernel[(rows // config["ROWS"],)](*arguments, TOKENS=DECODE_TOKENS, num_stages=1, **sizes)
    elif tokens <= DECODE_TOKENS:
        chained = is_chainable(x.device)
        options = {"ONE": tokens == 1, "CHAINED": chained, "launch_pdl": chained, **config}
        stream_kernel[(rows // config["ROWS"],)](*arguments, **options)
    else:
        grid = (triton.cdiv(tokens, config["TOKENS"]), rows // config["ROWS"])
        prefill_kernel[grid](*arguments, PORTABLE=portable, **config)


def _one_group(x: Tensor) -> Tensor:
    """[T, K] as [T, 1, K]; anything else is left for the check, which is told by its dimensions."""
    return x[:, None] if x.ndim == 2 else x.flatten()


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def _check(x: Tensor, matrices: tuple[Matrix, ...], out: Tensor) -> None:
    """x [T, G, K], matrices [G*N, K] and out [T, G, N] fit together, else ValueError."""
    if x.ndim != 3 or out.ndim != 3:
        raise ValueError(
            f"fp8_linear: x {tuple(x.shape)} and out {tuple(out.shape)}, expected [T, K] and [T, N], or [T, G, K] and [T, G, N]"
        )
    (tokens, groups, columns), rows = x.shape, out.shape[1] * out.shape[2]
    divisible = out.shape[2] % BLOCK_SIZE == 0 and columns % BLOCK_SIZE == 0
    if out.shape[:2] != (tokens, groups) or not divisible or not rows * columns:
        raise ValueError(
            f"fp8_linear: x {tuple(x.shape)} and out {tuple(out.shape)}, expected [T, G, K] and [T, G, N] with K and N multiples of "
            "128, none zero"
        )
    if x.dtype not in DTYPES or out.dtype not in DTYPES:
        raise ValueError(f"fp8_linear: x {x.dtype} and out {out.dtype}, expected bfloat16 or float32; convert them")
    for matrix in matrices:
        _check_matrix(matrix, rows, columns)
    tensors = (x, out, *(part for matrix in matrices for part in matrix))
    if any(part is not None and (part.device != x.device or not part.is_contiguous()) for part in tensors):
        raise ValueError(f"fp8_linear: a tensor is not contiguous or not on {x.device}; move or copy it first")


def _check_matrix(matrix: Matrix, rows: int, columns: int) -> None:
    codes, scales = matrix
    if codes.shape != (rows, columns) or codes.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(
            f"fp8_linear: codes {codes.dtype} {tuple(codes.shape)}, expected float8_e4m3fn [{rows}, {columns}]"
        )
    expected = (rows // BLOCK_SIZE, columns // BLOCK_SIZE)
    if scales is None or scales.shape != expected or scales.dtype != torch.uint8:
        found = "none" if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
        raise ValueError(f"fp8_linear: scales {found}, expected uint8 {list(expected)}, one a 128 x 128 block")
