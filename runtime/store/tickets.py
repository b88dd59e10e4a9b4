"""What the reader is asked for: a slab as a ticket, cut into pieces that workers take one by one. No thread, no file handle.

Fields that begin with an underscore belong to `reader.SlabReader`, which changes them under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from runtime.store.reader import SlabReader

Verify = Callable[[memoryview], None]


class Place(NamedTuple):
    """A file and the one of the reader's directories it lies in."""

    directory: Path
    file: Path


class SlabRead(NamedTuple):
    """What a ticket asks for."""

    path: str  # below a directory
    places: list[Place]
    offset_bytes: int
    target: memoryview
    label: str
    verify: Verify | None


class Ticket:
    """One slab on its way. The target belongs to the reader until the ticket is done, then to the caller again."""

    def __init__(self, reader: SlabReader, slab: SlabRead, bounds: list[int], kind: str) -> None:
        self._reader, self._slab, self._kind = reader, slab, kind
        self._bounds = bounds  # piece i is target[bounds[i] : bounds[i + 1]]
        self._begun = self._ended = 0  # pieces
        self._turn = 0  # which of the places the first piece comes from
        self._submitted = time.perf_counter()
        self._error: BaseException | None = None
        self._is_done = False
        self._watchers: list[SimpleQueue[Ticket]] = []

    @property
    def label(self) -> str:
        """What the caller named it."""
        return self._slab.label

    def is_done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._is_done

    def wait(self) -> None:
        """Returns when the whole slab is in the target and, where asked for, verified.

        Raises:
            StoreError: It could not be read, or was cancelled; names file, label, what was found and expected.
            Exception: Whatever `verify` raised.
        """
        if not self._is_done:
            next(self._reader.completed([self]))
        if self._error is not None:
            raise self._error

    def _begin_piece(self, now: float) -> Piece:
        begin, end = self._bounds[self._begun : self._begun + 2]
        place = self._slab.places[(self._turn + self._begun) % len(self._slab.places)]
        self._begun += 1
        return Piece(self, place, self._slab.target[begin:end], self._slab.offset_bytes + begin, self._kind, now)

    def _give_up(self, error: BaseException) -> None:
        """Pieces that nobody has begun are not to be read; the first error is the one that counts."""
        self._error = self._error or error
        del self._bounds[self._begun + 1 :]

    def _is_all_begun(self) -> bool:
        return self._begun == len(self._bounds) - 1

    def _is_all_ended(self) -> bool:
        return self._ended == len(self._bounds) - 1


@dataclass(slots=True)
class Piece:
    """A part of a slab that a worker is reading."""

    ticket: Ticket
    place: Place
    target: memoryview
    offset_bytes: int
    kind: str
    begin: float
    is_reported: bool = False
