"""Routed experts on many tokens at once (prefill): picks sorted by expert, weights of any format, one output per pick.

Owns no weights and no slots: experts are named by slab addresses (`kernels.expert_gemv.slabs`), and whoever gives them keeps
those slabs in place until the kernels have run. Not for captured graphs: sorting allocates. NaN in x, weights, group bytes and
table rows gives NaN in the outputs where the definition has it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.checks import FLOAT32, FLOATS, INTEGERS, expect
from kernels.expert_gemm.kernel import hidden_kernel, output_kernel
from kernels.expert_gemm.plan import plan_tiles
from kernels.expert_gemv.slabs import KINDS, Rows
from kernels.formats import BLOCK_SIZE
from kernels.fp8_linear import shared_bytes
from kernels.tuning import Config, choose


class Experts(NamedTuple):
    """The experts of a call, on the kernels' device; their fields are those of `kernels.expert_gemv.slabs.Picks`.

    slabs: int64 [E, 2], address / 16. kinds: int32 [E]. normalisers: float32 [E, 3].
    """

    slabs: Tensor
    kinds: Tensor
    normalisers: Tensor


class Routed(NamedTuple):
    """Who goes where: picks int64 or int32 [T, K], indices into the call's experts, negative for none; weights float32 [T, K]."""

    picks: Tensor
    weights: Tensor


def expert_gemm(
    x: Tensor,
    routed: Routed,
    experts: Experts,
    rows: Rows,
    hidden: Tensor,
    out: Tensor,
    *,
    limit: float,
    kinds: Collection[int] = KINDS,
) -> Tensor:
    """`out` [T, K, D]: each pick's weighted output; picks outside the call are left as they are.

    Args:
        x: [T, D] bfloat16, or float32, which is rounded to it.
        routed: Picks and route weights.
        experts: Slabs, kinds and normalisers.
        rows: The layer's table rows.
        hidden: Scratch, bfloat16 [T*K, F].
        out: bfloat16 or float32.
        limit: The clamp of gate and up.
        kinds: Those that occur among the experts; experts of others are left out.

    Raises:
        ValueError: A shape, dtype, device or layout is wrong.
    """
    call = Call(x, routed, experts, rows, hidden, out, limit)
    _check(call, kinds)
    if not x.is_cuda:
        raise ValueError("expert_gemm: x on the CPU, expected CUDA; expert_gemm_reference runs anywhere")
    return launch_gemm(call, kinds)


class Call(NamedTuple):
    """The arguments of `expert_gemm`."""

    x: Tensor
    routed: Routed
    experts: Experts
    rows: Rows
    hidden: Tensor
    out: Tensor
    limit: float


def launch_gemm(call: Call, kinds: Collection[int] = KINDS, *, portable: bool = False) -> Tensor:
    """Runs the kernels, unchecked."""
    picks, experts = call.routed.picks.numel(), call.experts.kinds.numel()
    if picks == 0 or experts == 0:
        return call.out
    average = triton.next_power_of_2(max(1, picks // experts))
    shape = f"{call.x.shape[1]}x{call.hidden.shape[1]}"
    key = f"{shape} n{average} kinds {''.join(map(str, sorted(kinds)))} {str(call.out.dtype)[6:]}"
    run = partial(_launch, call, sorted(kinds), portable)
    run(choose("expert_gemm", key, candidates(average, call.x.device), run, call.x.device))
    return call.out


def candidates(average: int, device: torch.device) -> list[Config]:
    """Configurations of equal bits: rows and picks of a tile, for so many picks an expert (a power of two), that fit this card."""
    tokens, limit = min(64, max(16, average)), shared_bytes(device)
    sizes = [(64, tokens, 4, 3), (128, tokens, 8, 3), (64, tokens, 4, 4), (64, max(16, tokens // 2), 4, 3)]
    if average > 64:
        sizes += [(64, 128, 4, 3), (128, 128, 8, 3)]
    names = ("ROWS", "TOKENS", "num_warps", "num_stages")
    fitting = [size for size in dict.fromkeys(sizes) if (256 * size[1] + 128 * size[0]) * size[3] <= limit]
    return [dict(zip(names, size, strict=True)) for size in fitting]


def by_place(x: Tensor) -> Tensor:
    """x [T, K] as bfloat16 in the kernels' order: block of 128, place in a group of four codes, group."""
    return x.bfloat16().unflatten(1, (-1, BLOCK_SIZE // 4, 4)).transpose(2, 3).contiguous().flatten(1)


def _launch(call: Call, kinds: list[int], portable: bool, config: Config) -> None:
    """Both stages for each kind, with these sizes."""
    (picks, weights), experts, hidden = call.routed, call.experts, call.hidden
    plan = plan_tiles(picks, experts.kinds, config["TOKENS"])
    (hidden_size, width), tiles = (call.x.shape[1], hidden.shape[1]), plan.tiles.shape[0]
    tables = (call.rows.bfloat16_levels, call.rows.split_rows)
    shared = (plan.order, plan.tiles, experts.slabs, experts.normalisers, *tables)
    x = by_place(call.x)
    for kind in kinds:
        options = {"D": hidden_size, "F": width, "KIND": kind, "PORTABLE": portable, **config}
        grid = (width // config["ROWS"], tiles)
        hidden_kernel[grid](x, *shared, weights, hidden, call.limit, picks.shape[1], **options)
        output_kernel[(hidden_size // config["ROWS"], tiles)](hidden, *shared, call.out, **options)


def _check(call: Call, kinds: Collection[int]) -> None:
    """Everything fits together, else ValueError."""
    x, (picks, weights), experts, rows, hidden, out, _ = call
    if x.ndim != 2 or hidden.ndim != 2 or any(size == 0 or size % BLOCK_SIZE for size in (x.shape[1], hidden.shape[1])):
        found = f"x {tuple(x.shape)}, hidden {tuple(hidden.shape)}"
        raise ValueError(f"expert_gemm: {found}; expected [T, D] and [T*K, F] with D and F multiples of 128")
    if picks.ndim != 2 or experts.kinds.ndim != 1:
        found = f"picks {tuple(picks.shape)}, kinds {tuple(experts.kinds.shape)}"
        raise ValueError(f"expert_gemm: {found}; expected [T, K] and [E]")
    if not set(kinds) <= set(KINDS):
        raise ValueError(f"expert_gemm: kinds {sorted(kinds)}, expected some of {list(KINDS)}; leave out the others")
    per_token, count = (x.shape[0], picks.shape[1]), experts.kinds.shape[0]
    expect("expert_gemm", "picks", picks, per_token, INTEGERS, x.device)
    expect("expert_gemm", "weights", weights, per_token, FLOAT32, x.device)
    expect("expert_gemm", "slabs", experts.slabs, (count, 2), (torch.int64,), x.device)
    expect("expert_gemm", "kinds", experts.kinds, (count,), (torch.int32,), x.device)
    expect("expert_gemm", "normalisers", experts.normalisers, (count, 3), FLOAT32, x.device)
    expect("expert_gemm", "hidden", hidden, (picks.numel(), hidden.shape[1]), (torch.bfloat16,), x.device)
    expect("expert_gemm", "out", out, (*per_token, x.shape[1]), FLOATS, x.device)
    expect("expert_gemm", "x", x, tuple(x.shape), FLOATS, x.device)
    expect("expert_gemm", "rows.bfloat16_levels", rows.bfloat16_levels, (3, 256, 2), (torch.int32,), x.device)
    expect("expert_gemm", "rows.split_rows", rows.split_rows, (3, 256), (torch.int32,), x.device)
