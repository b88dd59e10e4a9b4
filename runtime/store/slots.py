"""Slots as memory: VRAM and RAM buffers by plane, and the copies between them. Carries out moves; decides nothing.

Two kinds with the same methods. On the CPU "VRAM" is ordinary page-aligned memory, reads land in it and copies are done when
the call returns. On CUDA a read lands in the pinned `read_ring`, is copied on a stream of its own, and events fence every
re-use: a kernel waits for the copy into its slot, a copy waits for the last kernel that read the slot it overwrites, and a
ring buffer is written again only when its copy has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from runtime.store.arena import HostArena, whole_pages
from runtime.store.residency import Demote, PoolSizes, Promote, Read, Stage

Slot = tuple[str, int]  # (plane, VRAM slot)
_Ring = deque[
    tuple[Tensor, torch.cuda.Event | None]
]  # free buffers in order of use, each with the copy that must end first


class SlotMemory(Protocol):
    """What the store needs of the memory of both tiers."""

    copies_over_pcie: bool
    reads_at_once: int | None  # reads whose targets exist at the same time; None: as many as there are slots

    def view(self, plane: str, vram_slot: int) -> Tensor:
        """The slot's bytes on the device, uint8 [stride]."""
        ...

    def read_target(self, move: Read) -> Tensor:
        """Host memory, uint8 [stride], that the reader may fill for this read; the reader's until `land`."""
        ...

    def prefetch_target(self, move: Read) -> Tensor | None:
        """As `read_target`, for a guess, out of memory of its own; None if all of that is in use."""
        ...

    def land(self, move: Read) -> None:
        """The target is filled: sends it on to its slot and takes the target back."""
        ...

    def drop(self, move: Read) -> None:
        """The target was not filled and nobody writes to it any more: takes it back."""
        ...

    def promote(self, move: Promote | Stage) -> None:
        """RAM to VRAM, its pool or its staging ring."""
        ...

    def demote(self, move: Demote) -> None:
        """VRAM to RAM, before anything overwrites the slot."""
        ...

    def before_use(self, slots: Iterable[Slot]) -> None:
        """Kernels issued from here on see the slots' content."""
        ...

    def after_use(self, slots: Iterable[Slot]) -> None:
        """Whatever overwrites these slots waits for the kernels issued so far."""
        ...

    def close(self) -> None:
        """Ends what is under way and releases the memory."""
        ...


class HostSlots:
    """Both tiers in host memory, for machines without a GPU; every copy is done when its call returns."""

    copies_over_pcie = False
    reads_at_once: int | None = None

    def __init__(self, strides: Mapping[str, int], pools: Mapping[str, PoolSizes]) -> None:
        self._vram, self._ram = {}, {}
        sizes = {plane: (pool.vram + pool.staging, pool.ram) for plane, pool in pools.items()}
        self._arena = HostArena(sum(strides[plane] * sum(counts) for plane, counts in sizes.items()))
        for plane, (num_vram, num_ram) in sizes.items():
            self._vram[plane] = self._arena.take(num_vram, strides[plane])
            self._ram[plane] = self._arena.take(num_ram, strides[plane])

    def view(self, plane: str, vram_slot: int) -> Tensor:
        return self._vram[plane][vram_slot]

    def read_target(self, move: Read) -> Tensor:
        return self._vram[move.plane][move.vram_slot]

    def prefetch_target(self, move: Read) -> Tensor | None:
        return self.read_target(move)

    def land(self, move: Read) -> None:
        pass

    def drop(self, move: Read) -> None:
        pass

    def promote(self, move: Promote | Stage) -> None:
        self._vram[move.plane][move.vram_slot].copy_(self._ram[move.plane][move.ram_slot])

    def demote(self, move: Demote) -> None:
        self._ram[move.plane][move.ram_slot].copy_(self._vram[move.plane][move.vram_slot])

    def before_use(self, slots: Iterable[Slot]) -> None:
        pass

    def after_use(self, slots: Iterable[Slot]) -> None:
        pass

    def close(self) -> None:
        self._vram.clear()
        self._ram.clear()
        self._arena.close()


class CudaSlots:
    """VRAM buffers on a card, RAM slots and the read ring in one pinned arena, copies on one stream in the order of calls."""

    copies_over_pcie = True

    def __init__(
        self, strides: Mapping[str, int], pools: Mapping[str, PoolSizes], ring_slots: int, device: torch.device
    ) -> None:
        self._device, self._strides = device, strides
        ring_stride = max(strides[plane] for plane in pools)
        ram_bytes = sum(strides[plane] * pool.ram for plane, pool in pools.items())
        num_guesses = sum(pool.staging for pool in pools.values())
        self._arena = HostArena(ram_bytes + (ring_slots + num_guesses) * whole_pages(ring_stride), pin=True)
        self._vram = {
            plane: torch.empty(pool.vram + pool.staging, strides[plane], dtype=torch.uint8, device=device)
            for plane, pool in pools.items()
        }
        self._ram = {plane: self._arena.take(pool.ram, strides[plane]) for plane, pool in pools.items()}
        self.reads_at_once: int | None = ring_slots // 2  # one half lands while the other is being read
        self._read_ring = self._ring(ring_slots, ring_stride)
        self._prefetch_ring = self._ring(
            num_guesses, ring_stride
        )  # apart, so that guesses never keep a demand read waiting
        self._targets: dict[Slot, tuple[Tensor, _Ring]] = {}
        self._stream = torch.cuda.Stream(device)
        self._arrivals: dict[Slot, torch.cuda.Event] = {}  # the copy into a slot that no kernel has waited for yet
        self._last_uses: dict[Slot, torch.cuda.Event] = {}  # the last kernel that read a slot
        # The buffers may be memory that kernels issued before still use, which only their own stream would wait for.
        torch.cuda.synchronize(device)

    def view(self, plane: str, vram_slot: int) -> Tensor:
        return self._vram[plane][vram_slot]

    def read_target(self, move: Read) -> Tensor:
        return self._take(move, self._read_ring)

    def prefetch_target(self, move: Read) -> Tensor | None:
        return self._take(move, self._prefetch_ring) if self._prefetch_ring else None

    def land(self, move: Read) -> None:
        buffer, ring = self._targets.pop((move.plane, move.vram_slot))
        event = self._copy_in(move.plane, move.vram_slot, buffer[: self._strides[move.plane]])
        ring.append((buffer, event))

    def drop(self, move: Read) -> None:
        buffer, ring = self._targets.pop((move.plane, move.vram_slot))
        ring.append((buffer, None))

    def promote(self, move: Promote | Stage) -> None:
        self._copy_in(move.plane, move.vram_slot, self._ram[move.plane][move.ram_slot])

    def demote(self, move: Demote) -> None:
        # The slot's content came over this stream, or is only read by kernels: no event to wait for. A RAM slot is touched
        # by this stream alone, so copies into and out of it are in order by themselves.
        with torch.cuda.stream(self._stream):
            self._ram[move.plane][move.ram_slot].copy_(self._vram[move.plane][move.vram_slot], non_blocking=True)

    def before_use(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            event = self._arrivals.pop(slot, None)
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

    def after_use(self, slots: Iterable[Slot]) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._last_uses.update(dict.fromkeys(slots, event))

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        for held in (self._vram, self._ram, self._targets, self._read_ring, self._prefetch_ring):
            held.clear()
        self._arena.close()

    def _ring(self, num_slots: int, stride: int) -> _Ring:
        return deque((self._arena.take(stride), None) for _ in range(num_slots))

    def _take(self, move: Read, ring: _Ring) -> Tensor:
        buffer, copied = ring.popleft()
        if copied is not None:
            copied.synchronize()
        self._targets[move.plane, move.vram_slot] = buffer, ring
        return buffer[: self._strides[move.plane]]

    def _copy_in(self, plane: str, vram_slot: int, source: Tensor) -> torch.cuda.Event:
        """The event of the copy into a slot, issued behind the slot's last use."""
        last_use = self._last_uses.pop((plane, vram_slot), None)
        if last_use is not None:
            self._stream.wait_event(last_use)
        with torch.cuda.stream(self._stream):
            self._vram[plane][vram_slot].copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        self._arrivals[plane, vram_slot] = event
        return event
