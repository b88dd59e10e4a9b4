"""How many slots each plane gets: from counts the user gives, or from bytes of VRAM and RAM. Integers only.

`--slots F,R,f,r` counts experts held at FP4 in VRAM and RAM, then experts held at 2-bit only. Two copies: F slots of fp4 and f
of the 2-bit plane. Split: F + f slots of base and F of residual. The same numbers cost the same bytes in either layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runtime.errors import StrawError
from runtime.store.residency import PoolSizes

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "B": 1}  # longest names first


class Shares(NamedTuple):
    """What FP4 gets of the bytes left for pools, in VRAM and in RAM; the defaults are the article's best configuration."""

    fp4_vram: float = 0.95
    fp4_ram: float = 0.82


class Slots(NamedTuple):
    """Experts held: at FP4 in VRAM and in RAM, then at 2-bit only in VRAM and in RAM."""

    fp4_vram: int
    fp4_ram: int
    two_bit_vram: int
    two_bit_ram: int


class Layout(NamedTuple):
    """The planes of both precisions, and the bytes of a slot by plane."""

    fp4: tuple[str, ...]
    two_bit: tuple[str, ...]
    strides: Mapping[str, int]

    @property
    def planes(self) -> set[str]:
        """Those that have slots."""
        return {*self.fp4, *self.two_bit}

    @property
    def fp4_bytes(self) -> int:
        """One expert at FP4."""
        return sum(self.strides[plane] for plane in self.fp4)

    @property
    def two_bit_bytes(self) -> int:
        """One expert at 2-bit; 0 where there is no such precision."""
        return sum(self.strides[plane] for plane in self.two_bit)


def parse_slots(slots: str | Sequence[int] | None) -> Slots | None:
    """The four counts that `F,R,f,r`, or a sequence, gives; None stays None.

    Raises:
        StrawError: They are not four counts.
    """
    if slots is None:
        return None
    parts = [part.strip() for part in slots.split(",")] if isinstance(slots, str) else [str(count) for count in slots]
    if len(parts) != len(Slots._fields) or not all(part.isascii() and part.isdecimal() for part in map(_short, parts)):
        raise StrawError(
            f"--slots {slots}: expected four counts F,R,f,r (FP4 in VRAM, in RAM, 2-bit only in VRAM, in RAM), e.g. --slots 1050,1250,100,500"
        )
    return Slots(*map(int, parts))


def pool_sizes(slots: Slots, layout: Layout, staging: int) -> dict[str, PoolSizes]:
    """Slots by plane; `staging` more in VRAM for each plane that has any, counted apart."""
    pools = {plane: PoolSizes(slots.fp4_vram, slots.fp4_ram) for plane in layout.fp4}
    for plane in layout.two_bit:
        shared = pools.get(plane, PoolSizes(0, 0))
        pools[plane] = PoolSizes(shared.vram + slots.two_bit_vram, shared.ram + slots.two_bit_ram)
    return {plane: pool._replace(staging=staging if pool.vram else 0) for plane, pool in pools.items()}


def slots_for_bytes(
    vram_bytes: int, ram_bytes: int, layout: Layout, shares: Shares, *, num_experts: int, num_picks: int
) -> Slots:
    """As many experts as these bytes hold, FP4 and 2-bit in these shares; without a 2-bit precision all of it is FP4.

    Args:
        vram_bytes: Left for slots in VRAM.
        ram_bytes: Likewise in RAM.
        layout: Gives the bytes of an expert.
        shares: What FP4 gets; a share of 1 leaves 2-bit nothing.
        num_experts: Of the whole model: more slots than that would stay empty.
        num_picks: Experts of one token: 2-bit gets so many slots in VRAM even where its share is less.
    """
    fp4_vram, two_bit_vram = _share(vram_bytes, shares.fp4_vram, layout, num_experts, num_picks)
    elsewhere = fp4_vram + two_bit_vram  # an expert that VRAM holds needs no slot in RAM
    fp4_ram, two_bit_ram = _share(ram_bytes, shares.fp4_ram, layout, max(num_experts - elsewhere, 0), 0)
    return Slots(fp4_vram, fp4_ram, two_bit_vram, two_bit_ram)


def _share(num_bytes: int, share: float, layout: Layout, num_experts: int, least: int) -> tuple[int, int]:
    """(FP4, 2-bit) slots of one tier; what FP4 does not need of its share goes to 2-bit."""
    if not layout.two_bit or share == 1:
        return max(0, min(num_bytes // layout.fp4_bytes, num_experts)), 0
    fp4_bytes = min(int(num_bytes * share), num_bytes - least * layout.two_bit_bytes)
    fp4 = max(0, min(fp4_bytes // layout.fp4_bytes, num_experts))
    most = max(num_experts - fp4, least)
    return fp4, max(0, min((num_bytes - fp4 * layout.fp4_bytes) // layout.two_bit_bytes, most))


def _short(digits: str) -> str:
    """`digits`, or nothing if there are more than any count or size needs: Python refuses to read thousands of them."""
    return digits if len(digits) <= 20 else ""


def parse_bytes(size: str | int | None) -> int | None:
    """Bytes of a size like 24GB, 512MB or 8GiB; a number is bytes, None stays None.

    Raises:
        StrawError: It is no size.
    """
    if size is None or isinstance(size, int):
        return size
    for unit, factor in UNITS.items():
        number = size.strip().removesuffix(unit)
        digits = _short(number.strip().replace(".", "", 1))
        if number != size.strip() and digits.isascii() and digits.isdecimal():
            return int(float(number) * factor)
    raise StrawError(
        f"size {size!r}: expected a number with its unit, e.g. 24GB, 512MB or 8GiB; correct --vram or --ram"
    )
