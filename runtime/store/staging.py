"""Guesses on their way: brings slabs into the staging ring, lands them, hands over those that are wanted, counts what became of all.

Owns the tickets of prefetch reads. Which slab is worth a guess is `runtime.prefetch`'s business, where it may lie `residency`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from runtime.errors import StoreError
from runtime.store.residency import Demote, Promote, Read, Residency, Slab, Stage
from runtime.store.slab_files import SlabFiles
from runtime.store.slots import SlotMemory
from runtime.store.stats import StoreStats
from runtime.store.tickets import Ticket


class _Pending(NamedTuple):
    num_bytes: int  # read for it from NVMe; 0 if it came from RAM or was in the ring still
    is_certain: bool


class Staging:
    """The guesses of one store. A guess is pending from `issue` until it is used, or its layer has passed."""

    def __init__(
        self,
        residency: Residency,
        memory: SlotMemory,
        files: SlabFiles,
        stats: StoreStats,
        resolved: Callable[[bool], None],
    ) -> None:
        """`resolved` hears of each guess whether it was right."""
        self._residency, self._memory, self._files, self._stats, self._resolved = (
            residency,
            memory,
            files,
            stats,
            resolved,
        )
        self._on_the_way: dict[Slab, tuple[Ticket, Read]] = {}
        self._pending: dict[Slab, _Pending] = {}

    def issue(self, slab: Slab, is_certain: bool = False) -> int:
        """Bytes that the drive will read for this guess, whose end `resolved` hears of unless it is certain.

        0 if nothing is read: the slab is in VRAM, or comes from RAM, or there is no room for it.
        """
        if self._residency.renew(*slab):
            return self._begin(slab, 0, is_certain)
        move = self.place(slab)
        if move is None:
            return 0
        if isinstance(move, Stage):
            self._memory.promote(move)
            self._residency.arrived(move.plane, move.key)
            self._count(move, "stage")
            return self._begin(slab, 0, is_certain)
        ticket = self._files.submit_prefetch(move, self._memory)
        if ticket is None:
            self._residency.failed(move.plane, move.key)
            return 0
        self._on_the_way[slab] = ticket, move
        return self._begin(slab, self._files.stride_bytes(move.plane), is_certain)

    def place(self, slab: Slab) -> Read | Stage | None:
        """The move that brings the slab near, None if it cannot or need not be."""
        return self._residency.stage(*slab)

    def collect(self) -> None:
        """Lands what has been read since, without waiting."""
        for slab, (ticket, move) in list(self._on_the_way.items()):
            if ticket.is_done():
                del self._on_the_way[slab]
                if not self._end(ticket, move) and slab in self._pending:
                    del self._pending[slab]
                    self._stats.prefetch["failed"] += 1

    def claim(self, wants: Iterable[Slab]) -> dict[Ticket, Read]:
        """The reads of wanted slabs that are still on their way, now demand and the caller's to land; counts all guesses that were right."""
        claimed = {}
        for slab in wants:
            guess = self._pending.pop(slab, None)
            is_late = slab in self._on_the_way
            if is_late:
                ticket, move = self._on_the_way.pop(slab)
                self._files.promote(ticket)
                claimed[ticket] = move
            if guess is not None:
                self._stats.prefetch["late" if is_late else "used"] += 1
                self._resolve(guess, was_right=True)
        return claimed

    def retire(self, layer_idx: int) -> None:
        """The layer has been served: its guesses that nobody wanted were wrong, and what is not begun of them is not read."""
        self._residency.retire(layer_idx)
        for slab in [slab for slab in self._pending if slab[1].layer_idx == layer_idx]:
            guess = self._pending.pop(slab)
            self._resolve(guess, was_right=False)
            ticket, move = self._on_the_way.get(slab, (None, None))
            if ticket is not None and move is not None and self._files.cancel(ticket):
                del self._on_the_way[slab]
                self._end(ticket, move)
                self._stats.prefetch["cancelled"] += 1
                continue
            self._stats.prefetch["wasted"] += 1
            self._stats.prefetch["wasted_bytes"] += guess.num_bytes

    def drain(self) -> None:
        """Waits until nothing is on its way."""
        for ticket, _ in self._on_the_way.values():
            if not self._files.cancel(ticket):
                self._files.promote(ticket)
        for ticket, move in self._on_the_way.values():
            self._end(ticket, move)
        self._on_the_way.clear()
        self._pending.clear()

    def _resolve(self, guess: _Pending, was_right: bool) -> None:
        if not guess.is_certain:
            self._resolved(was_right)

    def _begin(self, slab: Slab, num_bytes: int, is_certain: bool) -> int:
        self._pending[slab] = _Pending(num_bytes, is_certain)
        self._stats.prefetch["issued"] += 1
        self._stats.prefetch["issued_bytes"] += num_bytes
        return num_bytes

    def _count(self, move: Read | Stage | Demote | Promote, kind: str) -> None:
        self._stats.move(move.plane, kind, self._files.stride_bytes(move.plane), self._memory.copies_over_pcie)

    def _end(self, ticket: Ticket, move: Read) -> bool:
        """Whether it was read. A guess that could not be is nobody's error: who needs the slab asks for it, and hears of it."""
        try:
            ticket.wait()
        except StoreError:
            self._memory.drop(move)
            self._residency.failed(move.plane, move.key)
            return False
        self._memory.land(move)
        self._residency.arrived(move.plane, move.key)
        self._count(move, "prefetch")
        return True
