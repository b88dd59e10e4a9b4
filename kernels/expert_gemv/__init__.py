"""Grouped expert GEMV: a few picks, each one expert for one token, straight from slots, one output per pick.

Precisions may be mixed in a call. Slabs may lie in device memory or in pinned host memory. Owns no slab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.expert_gemv.kernel import add_kernel, expert_kernel, pack_kernel
from kernels.expert_gemv.reference import add_picks_reference
from kernels.expert_gemv.slabs import Picks, Rows
from kernels.formats import GROUP_SIZE
from kernels.tuning import Config, choose

# Rows of a tile, tiles of a program, warps: from four to eight rows a lane, from one wave of programs to several.
CONFIGS = tuple(
    {"ROWS": rows, "TILES": tiles, "num_warps": warps}
    for rows, tiles, warps in (
        (16, 2, 4),
        (16, 1, 4),
        (8, 2, 1),
        (8, 1, 1),
        (4, 2, 1),
        (4, 4, 1),
        (8, 4, 2),
        (32, 1, 4),
    )
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a call needs beside inputs and output; allocated once, one call at a time.

    x: float16 [T, D], as `pack_kernel` leaves it, with its scales float32 [T, D/32]. hidden: float32 [P, F], what w2 is
    applied to; packed_hidden: the same as x is packed.
    """

    x: tuple[Tensor, Tensor]
    hidden: Tensor
    packed_hidden: tuple[Tensor, Tensor]

    @classmethod
    def allocate(cls, tokens: int, picks: int, hidden: int, width: int, device: torch.device) -> Workspace:
        """For calls of up to so many tokens and picks of experts with D = hidden and F = width."""

        def pair(rows: int, columns: int) -> tuple[Tensor, Tensor]:
            packed = torch.zeros(rows, columns, dtype=torch.float16, device=device)
            return packed, torch.zeros(rows, columns // GROUP_SIZE, device=device)

        return cls(pair(tokens, hidden), torch.zeros(picks, width, device=device), pair(picks, width))


def expert_gemv(x: Tensor, picks: Picks, rows: Rows, limit: float, workspace: Workspace, out: Tensor) -> Tensor:
    """out[p] = weight_p * w2_p · (silu(min(w1_p·x, limit)) * clamp(w3_p·x, ±limit)), each pick by itself.

    Args:
        x: [T, D] bfloat16, float16 or float32, contiguous, on a CUDA device.
        picks: P of them, on the same device; a kind of -1 leaves its row of `out` alone.
        rows: Table rows of this layer; any where all picks are FP4.
        limit: The clamp of gate (upper side) and up (both sides).
        workspace: For at least T tokens and P picks.
        out: [P, D] float32, D and F multiples of 32; F is the workspace's.

    Raises:
        ValueError: Shapes, types or devices do not fit each other.
    """
    _check(x, picks, rows, workspace, out)
    if not out.shape[0]:
        return out
    if x.device.type != "cuda":
        raise ValueError(f"expert_gemv: x on {x.device}, expected a CUDA device; use kernels.expert.expert_ffn there")
    return launch(x, picks, rows, limit, workspace, out, fast=True)


def launch(
    x: Tensor, picks: Picks, rows: Rows, limit: float, workspace: Workspace, out: Tensor, *, fast: bool
) -> Tensor:
    """`expert_gemv` unchecked; fast=False decodes without inline assembly, as the interpreter must."""
    num_picks, width, hidden = out.shape[0], workspace.hidden.shape[1], x.shape[1]
    chained = fast and torch.cuda.get_device_capability(x.device)[0] >= 9
    common = {"LIMIT": limit, "FAST": fast, "CHAINED": chained, "launch_pdl": chained}
    tables = (picks.normalisers, rows.levels.view(torch.int64), rows.scales, rows.split_rows)

    def gate_up(config: Config) -> None:
        grid = (-(-width // (config["ROWS"] // 2 * config["TILES"])), num_picks)
        inputs = (*_words(workspace.x), picks.slabs, picks.kinds, picks.tokens, picks.weights, *tables)
        sizes = {"UP": True, "HEIGHT": width, "GROUPS": hidden // GROUP_SIZE, "BLOCK_G": _lanes(hidden)}
        expert_kernel[grid](*inputs, workspace.hidden, **sizes, **common, **config)

    def down(config: Config) -> None:
        grid = (-(-hidden // (config["ROWS"] * config["TILES"])), num_picks)
        inputs = (*_words(workspace.packed_hidden), picks.slabs, picks.kinds, None, picks.weights, *tables)
        sizes = {"UP": False, "HEIGHT": hidden, "GROUPS": width // GROUP_SIZE, "BLOCK_G": _lanes(width)}
        expert_kernel[grid](*inputs, out, **sizes, **common, **config)

    shape = f"{hidden}x{width} p{triton.next_power_of_2(num_picks)}"
    _pack(x, workspace.x, chained=False)
    gate_up(choose("expert_gemv", f"gate_up/{shape}", CONFIGS, gate_up, x.device))
    _pack(workspace.hidden[:num_picks], workspace.packed_hidden, chained)
    down(choose("expert_gemv", f"down/{shape}", CONFIGS, down, x.device))
    return out


def _pack(vectors: Tensor, packed: tuple[Tensor, Tensor], chained: bool) -> None:
    count, groups = vectors.shape[0], vectors.shape[1] // GROUP_SIZE
    pack_kernel[(-(-groups // 16), count)](
        vectors, *packed, groups, BLOCK_G=16, CHAINED=chained, num_warps=1, launch_pdl=chained
    )


def _words(packed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return packed[0].view(torch.int32), packed[1]


def add_picks(picks: Tensor, shared: Tensor, out: Tensor) -> Tensor:
    """out = ((pick 0 + pick 1) + … + shared) in float32, rounded once: the layer's sum in rank order.

    Args:
        picks: [T, K, D] float32, contiguous.
        shared: [T, D] contiguous, the shared expert's output.
        out: [T, D] contiguous.

    Raises:
        ValueError: Shapes do not fit each other.
    """
    if picks.ndim != 3 or not picks.shape[1] or picks.dtype != torch.float32 or not picks.is_contiguous():
        raise ValueError(
            f"add_picks: picks {list(picks.shape)} {picks.dtype}, expected contiguous float32 [T, K, D] with K of 1 or more"
        )
    tokens, _, hidden = picks.shape
    for name, tensor in (("shared", shared), ("out", out)):
        if tensor.shape != (tokens, hidden) or tensor.device != picks.device or not tensor.is_contiguous():
            raise ValueError(
                f"add_picks: {name} is {list(tensor.shape)} on {tensor.device}, expected contiguous [{tokens}, {hidden}] on {picks.device}"
            )
    if picks.device.type == "cpu":
        return out.copy_(add_picks_reference(picks, shared, out.dtype))
    return launch_add(picks, shared, out)


def launch_add(picks: Tensor, shared: Tensor, out: Tensor) -> Tensor:
    """`add_picks` by the kernel, unchecked."""
    tokens, num_picks, hidden = picks.shape
    add_kernel[(tokens, -(-hidden // 512))](picks, shared, out, D=hidden, K=num_picks, BLOCK=512)
    return out


def _lanes(columns: int) -> int:
    """Groups of a row taken at once: one a lane, fewer in narrow matrices."""
    return min(32, 1 << (columns // GROUP_SIZE - 1).bit_length())


def _check(x: Tensor, picks: Picks, rows: Rows, workspace: Workspace, out: Tensor) -> None:
    if x.ndim != 2 or out.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"expert_gemv: x {list(x.shape)} {x.dtype} and out {list(out.shape)}, expected [T, D] of 16- or 32-bit floats and [P, D]"
        )
    (num_tokens, hidden), num_picks = x.shape, out.shape[0]
    room, width = workspace.hidden.shape
    if hidden % GROUP_SIZE or width % GROUP_SIZE:
        raise ValueError(f"expert_gemv: D {hidden} and F {width}, expected multiples of {GROUP_SIZE}")
    if num_tokens > workspace.x[0].shape[0] or num_picks > room or workspace.x[0].shape[1] != hidden:
        held = f"at most {workspace.x[0].shape[0]} and {room} with D {workspace.x[0].shape[1]}"
        raise ValueError(
            f"expert_gemv: {num_tokens} tokens and {num_picks} picks with D {hidden}, expected {held}; allocate a larger workspace"
        )
    expected = {
        "x": (x, (num_tokens, hidden), x.dtype),
        "out": (out, (num_picks, hidden), torch.float32),
        "slabs": (picks.slabs, (num_picks, 2), torch.int64),
        "kinds": (picks.kinds, (num_picks,), torch.int32),
        "tokens": (picks.tokens, (num_picks,), torch.int32),
        "weights": (picks.weights, (num_picks,), torch.float32),
        "normalisers": (picks.normalisers, (num_picks, 3), torch.float32),
        "levels": (rows.levels, (3, 256, 2), torch.int32),
        "scales": (rows.scales, (3, 256), torch.float32),
        "split_rows": (rows.split_rows, (3, 256), torch.int32),
        "the workspace": (workspace.hidden, (room, width), torch.float32),
    }
    for name, (tensor, shape, dtype) in expected.items():
        fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device == x.device
        if not fits or not tensor.is_contiguous():
            found = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
            raise ValueError(f"expert_gemv: {name} is {found}, expected contiguous {list(shape)} {dtype} on {x.device}")
