"""Opens a tiered store on a model directory: settings in, joined parts out. Owns the budgets and the checks at start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from runtime.artifact import ModelDirectory
from runtime.errors import StrawError
from runtime.expert_weights import ExpertWeights
from runtime.ladder import AnyLadder, Ladder, Rung, check_precisions, parse_ladder
from runtime.prefetch import DriveBudget, Prefetcher
from runtime.store.budgets import Budgets, bytes_left, check_fits, scarcity_watch
from runtime.store.policies import ExpertKey
from runtime.store.pools import Layout, Shares, Slots, pool_sizes, slots_for_bytes
from runtime.store.reader import SlabReader
from runtime.store.residency import PoolSizes, Residency, check_pools
from runtime.store.slab_files import SlabFiles
from runtime.store.slots import CudaSlots, HostSlots, SlotMemory
from runtime.store.store import TieredStore
from runtime.store.tuned import AUTO, TUNED, read_tuned

STAGED_LAYERS = 2  # a staging ring holds the picks of so many layers


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """What a user may choose about the store.

    `code` None is the model directory's own. `slots` gives the pools directly; else `vram_bytes` and `ram_bytes` are budgets
    for all that the process uses there, None for what is free less a reserve. `shares` None is `runtime.toml`'s, or the
    defaults. `mirrors` are further directories with the same expert files.
    """

    ladder: str = "exact"
    renormalise: bool = True
    code: str | None = None
    slots: Slots | None = None
    vram_bytes: int | None = None
    ram_bytes: int | None = None
    shares: Shares | None = None
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
    new_prefetcher: Callable[[DriveBudget], Prefetcher] | None,
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
        new_prefetcher: Makes what guesses within a budget; None: nothing is prefetched, and no staging ring is allocated.
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
    num_staged = 0 if new_prefetcher is None else STAGED_LAYERS * model.config.num_experts_per_tok
    room = _Room(model, settings, device, used_bytes, num_staged)
    ladder = _ladder(settings, weights, room)
    layout = _layout(model, weights, ladder)
    num_picks = model.config.num_experts_per_tok
    slots = room.slots(layout, _shares(model, ladder, settings.shares))
    pools = pool_sizes(slots, layout, staging=num_staged)
    check_pools(pools, _demanded(ladder, layout, num_picks), num_picks)
    # All that can be found wrong with the directories comes before memory is taken and threads are started.
    new_residency, directories = _residencies(model, pools), _directories(model, settings.mirrors)
    checksums = model.read_checksums() if settings.verify_reads else {}
    memory = _memory(pools, layout, num_picks, device)
    files = SlabFiles(model, SlabReader(directories, warn=warn), checksums)
    prefetcher = new_prefetcher and new_prefetcher(DriveBudget(max(layout.strides[plane] for plane in layout.planes)))
    return TieredStore(weights, new_residency, memory, files, ladder, scarcity_watch(device, warn), prefetcher)


def _layout(model: ModelDirectory, weights: ExpertWeights, ladder: AnyLadder) -> Layout:
    """The planes that need slots under this ladder."""
    exact = ladder.is_exact(model.config.num_experts_per_tok)
    strides = {name: record.slab_stride_bytes for name, record in model.planes.items()}
    return Layout(weights.planes(Rung.FP4), () if exact else weights.planes(Rung.TWO_BIT), strides)


def _shares(model: ModelDirectory, ladder: AnyLadder, shares: Shares | None) -> Shares:
    """What FP4 gets of the bytes for pools: none or all where the ladder reads one precision only, else what is asked for or tuned."""
    num_picks = model.config.num_experts_per_tok
    if not ladder.needs_two_bit(num_picks):
        return Shares(1.0, 1.0)
    if not ladder.needs_fp4(num_picks):
        return Shares(0.0, 0.0)
    return read_tuned(model.directory).shares if shares is None else shares


def _residencies(model: ModelDirectory, pools: dict[str, PoolSizes]) -> Callable[[], Residency]:
    """Makes empty tiers whose use counts begin with the model's heat, if a trace has left any."""
    heat = model.read_heat()
    if heat is None:
        return partial(Residency, pools)
    counts, num_tokens = heat
    uses = {
        ExpertKey(layer, expert): n for layer, row in enumerate(counts.tolist()) for expert, n in enumerate(row) if n
    }
    return partial(Residency, pools, heat=uses, heat_tokens=num_tokens)


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

    "auto" is `runtime.toml`'s; without one 2,4 where there is a 2-bit precision, unless every expert fits at FP4: then saving
    on precision saves nothing.
    """
    model, num_picks = room.model, room.model.config.num_experts_per_tok
    has_two_bit = bool(weights.planes(Rung.TWO_BIT))
    tuned = read_tuned(model.directory).ladder if settings.ladder == AUTO else None
    if tuned is not None:
        return _tuned_ladder(model, tuned, settings.renormalise, has_two_bit)
    if settings.ladder == AUTO:
        exact = Ladder.exact(num_picks)
        slots = room.slots(_layout(model, weights, exact), Shares(1.0, 1.0))
        holds_all = slots.fp4_vram + slots.fp4_ram >= room.num_experts
        fits = has_two_bit and not holds_all
        return Ladder(min(2, num_picks), min(4, num_picks), settings.renormalise) if fits else exact
    ladder = parse_ladder(settings.ladder, num_picks, settings.renormalise)
    check_precisions(ladder, num_picks, has_two_bit, str(model.directory))
    return ladder


def _tuned_ladder(model: ModelDirectory, spelled: str, renormalise: bool, has_two_bit: bool) -> AnyLadder:
    """The ladder of `runtime.toml`; StrawError that names the file where the model cannot have it."""
    num_picks = model.config.num_experts_per_tok
    try:
        ladder = parse_ladder(spelled, num_picks, renormalise)
        check_precisions(ladder, num_picks, has_two_bit, str(model.directory))
    except StrawError as error:
        raise StrawError(f"{model.directory / TUNED}: {error}; or remove this file") from None
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
    check_fits(sum(strides[plane] * (pool.vram + pool.staging) for plane, pool in pools.items()), device)
    return CudaSlots(strides, pools, ring_slots=_ring_slots(layout, num_picks), device=device)


def _ring_slots(layout: Layout, num_picks: int) -> int:
    """Twice the reads of one token in one layer: one half lands while the other is being read."""
    return 2 * num_picks * len(layout.fp4)


class _Room(NamedTuple):
    """What there is to divide among the pools."""

    model: ModelDirectory
    settings: StoreSettings
    device: torch.device
    used_bytes: int
    num_staged: int

    @property
    def num_experts(self) -> int:
        return self.model.config.num_hidden_layers * self.model.config.n_routed_experts

    def slots(self, layout: Layout, shares: Shares) -> Slots:
        """The slots asked for, or as many as the budgets hold."""
        settings, num_picks = self.settings, self.model.config.num_experts_per_tok
        if settings.slots is not None:
            return settings.slots
        vram, ram = bytes_left(Budgets(settings.vram_bytes, settings.ram_bytes), self.device, self.used_bytes)
        if self.device.type == "cuda":
            num_buffers = _ring_slots(layout, num_picks) + self.num_staged * len(layout.planes)
            ram -= num_buffers * max(layout.strides.values())
        vram -= self.num_staged * sum(layout.strides[plane] for plane in layout.planes)
        room = max(vram, 0), max(ram, 0)
        return slots_for_bytes(*room, layout, shares, num_experts=self.num_experts, num_picks=num_picks)
