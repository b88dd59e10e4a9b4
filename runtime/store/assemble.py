"""Opens a tiered store on a model directory: settings in, joined parts out. Owns the budgets and the checks at start."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.artifact import ModelDirectory
from runtime.errors import StrawError
from runtime.expert_weights import ExpertWeights
from runtime.ladder import AnyLadder, Ladder, Rung, check_precisions, parse_ladder
from runtime.store.arena import available_ram_bytes
from runtime.store.policies import ExpertKey
from runtime.store.pools import Layout, Slots, pool_sizes, slots_for_bytes
from runtime.store.reader import SlabReader
from runtime.store.residency import PoolSizes, Residency, check_pools
from runtime.store.slab_files import SlabFiles
from runtime.store.slots import CudaSlots, HostSlots, SlotMemory
from runtime.store.store import TieredStore

AUTO = "auto"
WORKSPACE_BYTES = (
    1_500_000_000  # what a card needs beside weights, state and slots: activations, dequantised experts, CUDA
)
SCARCE_BYTES = 200_000_000  # free memory of a card below which the next allocation of anybody may fail
RAM_RESERVE_BYTES = 4_000_000_000
RAM_RESERVE_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What a user may choose about the store.

    `code` None is the model directory's own. `slots` gives the pools directly; else `vram_bytes` and `ram_bytes` are budgets
    for all that the process uses there, None for what is free less a reserve. `mirrors` are further directories with the same
    expert files.
    """

    ladder: str = "exact"
    renormalise: bool = True
    code: str | None = None
    slots: Slots | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    verify_reads: bool = False
    mirrors: Sequence[Path] = ()


def open_store(
    model: ModelDirectory,
    settings: StoreSettings,
    *,
    dtype: torch.dtype,
    device: torch.device,
    round_inputs: bool,
    used_bytes: int,
    warn: Callable[[str], None],
) -> TieredStore:
    """A store with empty tiers that takes over `model`.

    Args:
        model: Opened; closed with the store.
        settings: The user's choices.
        dtype: Of activations.
        device: Where slots called VRAM lie.
        round_inputs: Activation rounding A.
        used_bytes: What weights and state take on the device already; inside the budget.
        warn: Takes one line for the user.

    Raises:
        StrawError: The ladder, the pools or the budgets cannot be met.
    """
    if settings.slots is not None and (settings.vram_bytes is not None or settings.ram_bytes is not None):
        raise StrawError("--slots together with --vram or --ram: expected counts or budgets, not both; leave one out")
    code = _code(model, settings.code)
    weights = ExpertWeights(
        model.config, model.planes, code, model.read_tables(), dtype=dtype, device=device, round_inputs=round_inputs
    )
    room = _Room(model, settings, device, used_bytes)
    ladder = _ladder(settings, weights, room)
    layout = _layout(model, weights, ladder)
    num_picks = model.config.num_experts_per_tok
    pools = pool_sizes(room.slots(layout), layout, staging=_staging_slots(num_picks))
    check_pools(pools, _demanded(ladder, layout, num_picks), num_picks)
    memory = _memory(pools, layout, num_picks, device)
    files = SlabFiles(model, SlabReader(_directories(model, settings.mirrors), warn=warn), settings.verify_reads)
    return TieredStore(weights, _residency(model, pools), memory, files, ladder, watch=_watch(device, warn))


def _layout(model: ModelDirectory, weights: ExpertWeights, ladder: AnyLadder) -> Layout:
    """The planes that need slots under this ladder."""
    exact = ladder.is_exact(model.config.num_experts_per_tok)
    strides = {name: record.slab_stride_bytes for name, record in model.planes.items()}
    return Layout(weights.planes(Rung.FP4), () if exact else weights.planes(Rung.TWO_BIT), strides)


def _residency(model: ModelDirectory, pools: dict[str, PoolSizes]) -> Residency:
    """Empty tiers whose use counts begin with the model's heat, if a trace has left any."""
    heat = model.read_heat()
    if heat is None:
        return Residency(pools)
    counts, num_tokens = heat
    uses = {
        ExpertKey(layer, expert): n for layer, row in enumerate(counts.tolist()) for expert, n in enumerate(row) if n
    }
    return Residency(pools, heat=uses, heat_tokens=num_tokens)


def _watch(device: torch.device, warn: Callable[[str], None]) -> Callable[[], None]:
    """Looks whether others have taken the card's memory since the start; says so each time it gets scarce."""
    scarce = False

    def watch() -> None:
        nonlocal scarce
        free, _ = torch.cuda.mem_get_info(device)
        if free < SCARCE_BYTES and not scarce:
            warn(
                f"{device}: only {free:,} bytes of memory are free;{_other_users()} a driver may now page, and speed fall"
            )
        scarce = free < SCARCE_BYTES

    return watch if device.type == "cuda" else lambda: None


def _directories(model: ModelDirectory, mirrors: Sequence[Path]) -> list[Path]:
    missing = [mirror for mirror in mirrors if not (mirror / "experts").is_dir()]
    if missing:
        raise StrawError(
            f"{missing[0]}: no experts/ in it, expected a copy of {model.directory / 'experts'}; correct --mirror"
        )
    return [model.directory, *mirrors]


def _code(model: ModelDirectory, code: str | None) -> str | None:
    if code is not None and code not in model.codes:
        raise StrawError(
            f"--code {code}: {model.directory} has {', '.join(model.codes) or 'no 2-bit code'}, expected one of those; run: prep requant {model.directory}"
        )
    return code or model.code


def _ladder(settings: StoreSettings, weights: ExpertWeights, room: _Room) -> AnyLadder:
    """The ladder asked for, which the model's precisions must allow.

    "auto" is 2,4 where there is a 2-bit precision, unless every expert fits at FP4: then saving on precision saves nothing.
    """
    model, num_picks = room.model, room.model.config.num_experts_per_tok
    has_two_bit = bool(weights.planes(Rung.TWO_BIT))
    if settings.ladder == AUTO:
        exact = Ladder.exact(num_picks)
        slots = room.slots(_layout(model, weights, exact))
        holds_all = slots.fp4_vram + slots.fp4_ram >= room.num_experts
        fits = has_two_bit and not holds_all
        return Ladder(min(2, num_picks), min(4, num_picks), settings.renormalise) if fits else exact
    ladder = parse_ladder(settings.ladder, num_picks, settings.renormalise)
    check_precisions(ladder, num_picks, has_two_bit, str(model.directory))
    return ladder


def _demanded(ladder: AnyLadder, layout: Layout, num_picks: int) -> set[str]:
    """The planes that the ladder may read for a token."""
    fp4 = layout.fp4 if ladder.needs_fp4(num_picks) else ()
    two_bit = layout.two_bit if ladder.needs_two_bit(num_picks) else ()
    return {*fp4, *two_bit}


def _memory(pools: dict[str, PoolSizes], layout: Layout, num_picks: int, device: torch.device) -> SlotMemory:
    strides = {plane: layout.strides[plane] for plane in pools}
    if device.type == "cpu":
        return HostSlots(strides, pools)
    wanted = sum(strides[plane] * (pool.vram + pool.staging) for plane, pool in pools.items())
    free, _ = torch.cuda.mem_get_info(device)
    if wanted > free:
        raise StrawError(
            f"slots: {wanted:,} bytes of VRAM, {free:,} are free on {device}, expected that much;{_other_users()} give fewer --slots or a smaller --vram"
        )
    return CudaSlots(strides, pools, ring_slots=_ring_slots(layout, num_picks), device=device)


def _staging_slots(num_picks: int) -> int:
    """Of each plane's ring behind its VRAM slots, where guesses land: two layers' worth of picks."""
    return 2 * num_picks


def _ring_slots(layout: Layout, num_picks: int) -> int:
    """Twice the reads of one token in one layer: one half lands while the other is being read."""
    return 2 * num_picks * len(layout.fp4)


class _Room(NamedTuple):
    """What there is to divide among the pools."""

    model: ModelDirectory
    settings: StoreSettings
    device: torch.device
    used_bytes: int

    @property
    def num_experts(self) -> int:
        return self.model.config.num_hidden_layers * self.model.config.n_routed_experts

    def slots(self, layout: Layout) -> Slots:
        """The slots asked for, or as many as the budgets hold."""
        settings, num_picks = self.settings, self.model.config.num_experts_per_tok
        if settings.slots is not None:
            return settings.slots
        ram = _ram_left(settings.ram_bytes)
        if self.device.type == "cpu":
            # One memory plays both parts: everything is "VRAM" unless the user divides it.
            if settings.vram_bytes is None:
                vram, ram = ram, 0
            else:
                vram = settings.vram_bytes - self.used_bytes
                ram -= max(vram, 0) if settings.ram_bytes is None else 0
        else:
            vram = _vram_left(settings.vram_bytes, self.device, self.used_bytes)
            ram -= _ring_slots(layout, num_picks) * max(layout.strides.values())
        vram -= _staging_slots(num_picks) * sum(layout.strides[plane] for plane in layout.planes)
        return slots_for_bytes(max(vram, 0), max(ram, 0), layout, num_experts=self.num_experts, num_picks=num_picks)


def _ram_left(budget_bytes: int | None) -> int:
    """Bytes of host memory for slots.

    Raises:
        StrawError: The budget is more than the machine has left.
    """
    available = available_ram_bytes()
    if budget_bytes is None:
        reserve = max(RAM_RESERVE_BYTES, int(available * RAM_RESERVE_SHARE))
        return available - min(reserve, available // 2)  # a small machine can still run a small model
    if budget_bytes > available:
        raise StrawError(
            f"--ram {budget_bytes:,} bytes: {available:,} are available, expected no more than that; end other programs or give less"
        )
    return budget_bytes


def _vram_left(budget_bytes: int | None, device: torch.device, used_bytes: int) -> int:
    """Bytes of the card's memory for slots, after what the process uses there already.

    Raises:
        StrawError: The budget is more than the card has free; names the other processes on it.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if budget_bytes is None:
        return free - WORKSPACE_BYTES
    left = budget_bytes - used_bytes
    if left > free:
        raise StrawError(
            f"--vram {budget_bytes:,} bytes: {free:,} are free on {device} beside {used_bytes:,} of this process, expected that much;{_other_users()} end them or give less"
        )
    return left - WORKSPACE_BYTES


def _other_users() -> str:
    """The processes on the cards, as the driver lists them; empty if it cannot say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=5).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    users = "; ".join(line.strip() for line in listed if line.strip())
    return f" on the cards: {users};" if users else ""
