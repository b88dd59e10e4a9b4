"""Grouped expert GEMV: a few picks, each one expert for one token, straight from slots, one output per pick.

Precisions may be mixed in a call. Slabs may lie in device memory or in pinned host memory. Owns no slab.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton import next_power_of_2

from kernels.card import is_chainable
from kernels.checks import FLOAT32, expect
from kernels.expert_gemv.kernel import add_kernel, expert_kernel
from kernels.expert_gemv.layouts import Constants, Plan
from kernels.expert_gemv.packing import Packed, allocate_packed, pack_kernel
from kernels.expert_gemv.reference import add_picks_reference
from kernels.expert_gemv.slabs import KINDS, Picks, Rows
from kernels.expert_gemv.stream_kernel import stream_kernel
from kernels.formats import GROUP_SIZE
from kernels.tuning import Config, choose

SLICES = 4  # warps that share the groups of a row: the fastest of 2, 4 and 8 for the model's shapes on an H200
# Rows of a program (of w2; of w1 and w3 a program has 32, a group of the next input), warps that share them, registers of a lane,
# and whether the next kernel may already start while this one waits, where a card has that.
CONFIGS = tuple(
    {"rows": rows, "warps": warps, "maxnreg": registers, "early": early, "num_warps": SLICES * warps}
    for rows, warps, registers, early in (
        (32, 2, 80, 1),
        (32, 1, 168, 1),
        (32, 1, 168, 0),
        (32, 2, 104, 0),
        (64, 1, 168, 1),
        (64, 1, 168, 0),
        (64, 2, 104, 1),
    )
)


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a call needs beside inputs and output: x and what w2 is applied to, as `packing` has them; one call at a time."""

    x: Packed
    hidden: Packed

    @classmethod
    def allocate(cls, tokens: int, picks: int, hidden: int, width: int, device: torch.device) -> Workspace:
        """For calls of up to so many tokens and picks of experts with D = hidden and F = width.

        Raises:
            ValueError: D or F is no multiple of 32.
        """
        return cls(allocate_packed(tokens, hidden, device), allocate_packed(picks, width, device))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tokens, picks, D and F."""
        (tokens, x_blocks, _), (picks, hidden_blocks, _) = self.x[0].shape, self.hidden[0].shape
        return tokens, picks, (x_blocks - 1) * GROUP_SIZE, (hidden_blocks - 1) * GROUP_SIZE


def expert_gemv(x: Tensor, picks: Picks, rows: Rows, limit: float, workspace: Workspace, out: Tensor) -> Tensor:
    """out[p] = weight_p * w2_p · (silu(min(w1_p·x, limit)) * clamp(w3_p·x, ±limit)), each pick by itself.

    x and what w2 is applied to are rounded to 14 bits under the largest of each 32; an infinity in them counts as NaN, and FP4's
    scale byte 0 as zero.

    Args:
        x: [T, D] bfloat16, float16 or float32, contiguous, on a CUDA device of compute capability 8.0 or later.
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
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 0):
        expected = "a CUDA device of compute capability 8.0 or later"
        raise ValueError(f"expert_gemv: x on {x.device}, expected {expected}; use kernels.expert.expert_ffn there")
    return launch(x, picks, rows, limit, workspace, out)


def launch(
    x: Tensor, picks: Picks, rows: Rows, limit: float, workspace: Workspace, out: Tensor, *, portable: bool = False
) -> Tensor:
    """`expert_gemv` unchecked; portable: by the kernel that the interpreter can run."""
    num_picks, (_, _, hidden, width) = out.shape[0], workspace.sizes
    groups = hidden // GROUP_SIZE
    # Starts when all before it has ended: the next kernels read picks, tables and weights before they wait for this one.
    chained = not portable and is_chainable(x.device)
    pack_kernel[(-(-groups // 4), x.shape[0])](x, *workspace.x, groups, BLOCK_G=4, CHAINED=chained, num_warps=1)
    tables = (picks.weights, picks.normalisers, rows.levels, rows.split_selectors)
    addressed = (picks.slabs, picks.kinds)

    def gate_up(config: Config) -> None:
        plan = Plan(up=True, height=width, groups=groups, slices=SLICES, rows=GROUP_SIZE, warps=config["warps"])
        arguments = (*workspace.x, *addressed, picks.tokens, *tables, *workspace.hidden, limit)
        _run((width // GROUP_SIZE, num_picks), arguments, plan, config, chained, portable)

    def down(config: Config) -> None:
        sizes = {"height": hidden, "groups": width // GROUP_SIZE, "rows": config["rows"], "warps": config["warps"]}
        plan = Plan(up=False, slices=SLICES, **sizes)
        arguments = (*workspace.hidden, *addressed, None, *tables, out, workspace.hidden[1], limit)
        _run((hidden // plan.rows, num_picks), arguments, plan, config, chained, portable)

    def both(first: Config, second: Config) -> None:
        gate_up(first)
        down(second)

    # Timed together, since each has to be fast next to the other, on the kinds of the first call of this size.
    key = f"{hidden}x{width} p{next_power_of_2(num_picks)}"
    firsts, seconds = _candidates(GROUP_SIZE), _candidates(hidden)
    first = choose("expert_gemv", f"gate_up/{key}", firsts, lambda config: both(config, seconds[0]), x.device)
    second = choose("expert_gemv", f"down/{key}", seconds, lambda config: both(first, config), x.device)
    both(first, second)
    return out


def _candidates(rows: int) -> list[Config]:
    """Configurations whose programs' rows divide these."""
    return [config for config in CONFIGS if rows % config["rows"] == 0]


def _run(
    grid: tuple[int, int], arguments: tuple[object, ...], plan: Plan, config: Config, chained: bool, portable: bool
) -> None:
    plans = [Constants(replace(plan, kind=kind)) for kind in KINDS]
    if portable:
        expert_kernel[grid](*arguments, *plans)
    else:
        options = {name: config[name] for name in ("maxnreg", "num_warps")}
        stream_kernel[grid](
            *arguments, *plans, chained, chained and config["early"] == 1, **options, launch_pdl=chained
        )


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


def _check(x: Tensor, picks: Picks, rows: Rows, workspace: Workspace, out: Tensor) -> None:
    if x.ndim != 2 or out.ndim != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"expert_gemv: x {list(x.shape)} {x.dtype} and out {list(out.shape)}, expected [T, D] of 16- or 32-bit floats and [P, D]"
        )
    (num_tokens, hidden), num_picks = x.shape, out.shape[0]
    most_tokens, most_picks, columns, _ = workspace.sizes
    if hidden % GROUP_SIZE:
        raise ValueError(f"expert_gemv: D {hidden}, expected a multiple of {GROUP_SIZE}; pad the expert")
    if num_tokens > most_tokens or num_picks > most_picks or columns != hidden:
        held = f"at most {most_tokens} and {most_picks} with D {columns}"
        raise ValueError(
            f"expert_gemv: {num_tokens} tokens and {num_picks} picks with D {hidden}, expected {held}; allocate a workspace for these"
        )
    expect("expert_gemv", "x", x, (num_tokens, hidden), (x.dtype,), x.device)
    expect("expert_gemv", "out", out, (num_picks, hidden), FLOAT32, x.device)
    expect("expert_gemv", "slabs", picks.slabs, (num_picks, 2), (torch.int64,), x.device)
    expect("expert_gemv", "kinds", picks.kinds, (num_picks,), (torch.int32,), x.device)
    expect("expert_gemv", "tokens", picks.tokens, (num_picks,), (torch.int32,), x.device)
    expect("expert_gemv", "weights", picks.weights, (num_picks,), FLOAT32, x.device)
    expect("expert_gemv", "normalisers", picks.normalisers, (num_picks, 3), FLOAT32, x.device)
    expect("expert_gemv", "levels", rows.levels, (3, 256), (torch.int64,), x.device)
    expect("expert_gemv", "split_selectors", rows.split_selectors, (3, 256), (torch.int64,), x.device)
    for name, (blocks, scales), count in (("x", workspace.x, most_tokens), ("hidden", workspace.hidden, most_picks)):
        expect("expert_gemv", f"workspace.{name} blocks", blocks, (count, "B", 128), (torch.int8,), x.device)
        expect("expert_gemv", f"workspace.{name} scales", scales, blocks.shape[:2], FLOAT32, x.device)
