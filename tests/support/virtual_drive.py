"""A drive and a clock that exist only as integers: the store's reads take virtual microseconds, nobody sleeps.

The drive serves one piece of a slab after the other, demand before prefetch, and fills the target when the last one is through.
Time passes when a test says so (compute) and when the store waits for a read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from runtime.artifact import ModelDirectory
from runtime.errors import StoreError
from runtime.store.reader import Progress
from runtime.store.residency import Read
from runtime.store.slots import SlotMemory
from runtime.store.store import TieredStore

PIECES = 4


class VirtualClock:
    """Microseconds since the start; called, it gives seconds, as the store wants them."""

    def __init__(self) -> None:
        self.now_us = 0

    def __call__(self) -> float:
        return self.now_us / 1e6


class VirtualTicket:
    """A slab asked for: done when its pieces have been served, or when it was cancelled."""

    def __init__(self, drive: VirtualFiles, move: Read, target: Tensor) -> None:
        self.drive, self.move, self.target, self.left, self.was_cancelled = drive, move, target, PIECES, False

    def is_done(self) -> bool:
        self.drive.run()
        return self.was_cancelled or not self.left

    def wait(self) -> None:
        if self.was_cancelled:
            raise StoreError("cancelled")
        self.drive.wait_for([self])


class VirtualFiles:
    """Plays SlabFiles and its reader. Integers only but for the bytes themselves."""

    def __init__(self, model: ModelDirectory, clock: VirtualClock, bytes_per_us: int) -> None:
        self._model, self._clock, self._bytes_per_us = model, clock, bytes_per_us
        self._queues: dict[str, deque[VirtualTicket]] = {"demand": deque(), "prefetch": deque()}
        self._free_at_us = 0  # when the piece under way ends
        self._busy_us = self._demand_busy_us = self._num_bytes = 0
        self.prefetched: list[Read] = []

    def stride_bytes(self, plane: str) -> int:
        return self._model.planes[plane].slab_stride_bytes

    def submit(self, reads: Sequence[Read], memory: SlotMemory) -> dict[Any, Read]:
        return {self._queue(move, memory.read_target(move), "demand"): move for move in reads}

    def submit_prefetch(self, read: Read, memory: SlotMemory) -> VirtualTicket:
        target = memory.prefetch_target(read)
        assert target is not None
        self.prefetched.append(read)
        return self._queue(read, target, "prefetch")

    def promote(self, ticket: VirtualTicket) -> None:
        if ticket in self._queues["prefetch"]:
            self._queues["prefetch"].remove(ticket)
            self._queues["demand"].append(ticket)

    def cancel(self, ticket: VirtualTicket) -> bool:
        self.run()
        if ticket.left < PIECES or ticket not in self._queues["prefetch"]:
            return False
        self._queues["prefetch"].remove(ticket)
        ticket.was_cancelled = True
        return True

    def completed(self, tickets: dict[Any, Read]) -> Iterator[tuple[Read, StoreError | None]]:
        missing = dict(tickets)
        while missing:
            ticket = self.wait_for(list(missing))
            yield missing.pop(ticket), None

    def progress(self) -> Progress:
        self.run()
        return Progress(self._demand_busy_us / 1e6, self._busy_us / 1e6, self._num_bytes)

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._model.close()

    def wait_for(self, tickets: list[VirtualTicket]) -> VirtualTicket:
        """The first of these to be done; time passes until then."""
        while not (done := [ticket for ticket in tickets if ticket.is_done()]):
            self._serve()
            self._clock.now_us = max(self._clock.now_us, self._free_at_us)
        return done[0]

    def run(self) -> None:
        """Serves what could be begun before now."""
        while any(self._queues.values()) and self._free_at_us < self._clock.now_us:
            self._serve()

    def _queue(self, move: Read, target: Tensor, kind: str) -> VirtualTicket:
        self.run()
        if not any(self._queues.values()):
            self._free_at_us = max(self._free_at_us, self._clock.now_us)
        ticket = VirtualTicket(self, move, target)
        self._queues[kind].append(ticket)
        return ticket

    def _serve(self) -> None:
        kind = "demand" if self._queues["demand"] else "prefetch"
        ticket = self._queues[kind][0]
        num_bytes = self.stride_bytes(ticket.move.plane) // PIECES
        microseconds = -(-num_bytes // self._bytes_per_us)
        self._free_at_us += microseconds
        self._busy_us += microseconds
        self._demand_busy_us += microseconds if kind == "demand" else 0
        self._num_bytes += num_bytes
        ticket.left -= 1
        if not ticket.left:
            self._queues[kind].popleft()
            slab = self._model.read_slab(*ticket.move.key, ticket.move.plane)
            ticket.target[: len(slab)].copy_(slab)


class TimedStore(TieredStore):
    """A store whose every call is preceded by the layer's compute, in virtual time; remembers what the pools held after each."""

    clock: VirtualClock
    compute_us: int

    def __call__(self, *arguments: Any) -> Tensor:
        self.clock.now_us += self.compute_us
        picks = super().__call__(*arguments)
        pools = (self._residency._vram, self._residency._ram)
        self.contents.append([{plane: set(pool.slot_of) for plane, pool in tier.items()} for tier in pools])
        return picks

    def begin(self, clock: VirtualClock, compute_us: int) -> TimedStore:
        """Itself, ready."""
        self.clock, self.compute_us, self.contents = clock, compute_us, []
        return self
