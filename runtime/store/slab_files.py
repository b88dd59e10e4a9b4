"""Slabs of a model directory as reads: which file, where, checked how. Joins `artifact`'s offsets to the reader's tickets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.artifact import ModelDirectory, expert_file
from runtime.errors import StoreError
from runtime.store.reader import Progress, SlabReader, Ticket
from runtime.store.residency import Read
from runtime.store.slots import SlotMemory


class SlabFiles:
    """Starts the reads that `residency` asks for, and says which has ended how."""

    def __init__(self, model: ModelDirectory, reader: SlabReader, checksums: Mapping[str, Tensor]) -> None:
        """Takes over `reader`, which looks at `model`'s directory and its mirrors; with `checksums` each slab's CRC-32 is checked."""
        self._model, self._reader, self._checksums = model, reader, checksums

    def stride_bytes(self, plane: str) -> int:
        """Bytes that one read of the plane moves."""
        return self._model.planes[plane].slab_stride_bytes

    def submit(self, reads: Sequence[Read], memory: SlotMemory) -> dict[Ticket, Read]:
        """The tickets of `reads`, all queued as demand, into targets that `memory` gives."""
        return {self._submit(move, memory.read_target(move), demand=True): move for move in reads}

    def submit_prefetch(self, read: Read, memory: SlotMemory) -> Ticket | None:
        """The ticket of a read that every demand read passes; None if `memory` has no target for it now."""
        target = memory.prefetch_target(read)
        return None if target is None else self._submit(read, target, demand=False)

    def promote(self, ticket: Ticket) -> None:
        """What is left of that prefetch is demand now."""
        self._reader.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        """Whether that prefetch had not been begun; then it is done and has failed."""
        return self._reader.cancel(ticket)

    def progress(self) -> Progress:
        """How busy the drive has been."""
        return self._reader.progress()

    def completed(self, tickets: dict[Ticket, Read]) -> Iterator[tuple[Read, StoreError | None]]:
        """Each read as it ends, blocking in between, with the error that it ended by."""
        for ticket in self._reader.completed(tickets):
            try:
                ticket.wait()
            except StoreError as error:
                yield tickets[ticket], error
            else:
                yield tickets[ticket], None

    def stats(self) -> dict[str, Any]:
        """What the reader has measured."""
        return self._reader.stats()

    def close(self) -> None:
        """Ends the reader and closes the model directory."""
        self._reader.close()
        self._model.close()

    def _submit(self, move: Read, target: Tensor, demand: bool) -> Ticket:
        layer_idx, expert_id = move.key
        return self._reader.submit(
            expert_file(move.plane, layer_idx),
            expert_id * self.stride_bytes(move.plane),
            target,
            label=f"layer {layer_idx} expert {expert_id} {move.plane}",
            demand=demand,
            verify=self._verifier(move) if self._checksums else None,
        )

    def _verifier(self, move: Read) -> Callable[[memoryview], None]:
        expected = int(self._checksums[move.plane][move.key])
        slab_bytes = self._model.planes[move.plane].slab_bytes
        path = self._model.expert_path(move.plane, move.key.layer_idx)

        def verify(slab: memoryview) -> None:
            found = zlib.crc32(slab[:slab_bytes])
            if found != expected:
                raise StoreError(
                    f"{path}: expert {move.key.expert_id} has CRC-32 {found:08x}, expected {expected:08x}; run: prep verify {Path(self._model.directory)}"
                )

        return verify
