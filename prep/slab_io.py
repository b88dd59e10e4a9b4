"""Slabs of many experts in and out at the drive's speed: batches read ahead, and files written past the page cache.

Owns the buffers' order of use and the writing threads' work. Reading itself is `runtime.store.reader`'s; what a slab means,
`kernels.formats` knows.
"""

from __future__ import annotations

import errno
import fcntl
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from runtime.errors import ArtifactError
from runtime.files import writing_failed
from runtime.manifest import CHECKSUMS, Manifest, PlaneRecord, content_remedy, expert_file
from runtime.store.arena import HostArena, view_bytes, whole_pages
from runtime.store.reader import SlabReader, Ticket, Verify

Warn = Callable[[str], None]
Blocks = dict[str, Tensor]  # plane -> [experts, slab_stride_bytes] uint8, page-aligned
Done = Callable[[int, str, int, int], None]  # told layer, plane, expert and CRC-32 of a slab that was written
Written = Future[tuple[int, str, int, int]]


class Batch(NamedTuple):
    """Neighbouring experts of one layer, the unit of reading and computing."""

    layer_idx: int
    first: int
    number: int


def batches(layers: Sequence[int], num_experts: int, count: int) -> list[Batch]:
    """All experts of `layers` in order, `count` at a time."""
    return [
        Batch(layer_idx, first, min(count, num_experts - first))
        for layer_idx in layers
        for first in range(0, num_experts, count)
    ]


class BlockRing:
    """`depth` sets of blocks for `count` experts in each of the planes, from one allocation; `close` unpins it."""

    def __init__(self, records: Mapping[str, PlaneRecord], count: int, depth: int, pin: bool = False) -> None:
        sizes = {plane: count * record.slab_stride_bytes for plane, record in records.items()}
        self._arena = HostArena(depth * sum(whole_pages(size) for size in sizes.values()), pin=pin)
        self.sets: list[Blocks] = [
            {plane: self._arena.take(count, record.slab_stride_bytes) for plane, record in records.items()}
            for _ in range(depth)
        ]

    def close(self) -> None:
        """No copy to or from a card may be under way."""
        self._arena.close()


def read_ahead(
    reader: SlabReader, todo: Sequence[Batch], ring: BlockRing, verify: Callable[[str, int, int], Verify]
) -> Iterator[tuple[Batch, Blocks]]:
    """Each batch with its slabs in every plane of the ring; the blocks are the caller's until it asks for the next.

    Args:
        reader: On the model directory.
        todo: In the order wanted.
        ring: Its depth is how many batches are in memory.
        verify: Of (plane, layer, expert): what checks that slab.

    Raises:
        StrawError: A slab could not be read, or `verify` refused it.
    """
    under_way: deque[tuple[Batch, Blocks, list[Ticket]]] = deque()
    free, rest = deque(ring.sets), deque(todo)
    while under_way or rest:
        while free and rest:
            batch, blocks = rest.popleft(), free.popleft()
            under_way.append((batch, blocks, _submit(reader, batch, blocks, verify)))
        batch, blocks, tickets = under_way.popleft()
        for ticket in tickets:
            ticket.wait()
        yield batch, {plane: block[: batch.number] for plane, block in blocks.items()}
        free.append(blocks)


def _submit(
    reader: SlabReader, batch: Batch, blocks: Blocks, verify: Callable[[str, int, int], Verify]
) -> list[Ticket]:
    return [
        submit_slab(reader, plane, batch.layer_idx, batch.first + place, block[place], verify)
        for place in range(batch.number)
        for plane, block in blocks.items()
    ]


def submit_slab(
    reader: SlabReader,
    plane: str,
    layer_idx: int,
    expert_id: int,
    target: Tensor,
    verify: Callable[[str, int, int], Verify],
) -> Ticket:
    """The read of one whole slab with its padding into `target` [slab_stride_bytes]."""
    return reader.submit(
        expert_file(plane, layer_idx),
        expert_id * target.numel(),
        target,
        label=f"layer {layer_idx} expert {expert_id} {plane}",
        verify=verify(plane, layer_idx, expert_id),
    )


class SlabCheck:
    """Makes the check of each slab against its checksum and of the padding behind it against zero."""

    def __init__(
        self, directory: Path, manifest: Manifest, planes: Iterable[str], checksums: Mapping[str, Tensor]
    ) -> None:
        """`planes` are in the manifest's; `checksums` as in `runtime.artifact.read_checksums`."""
        self._directory, self._manifest = directory, manifest
        self._records = records = {plane: manifest.planes[plane] for plane in planes}
        self._expected = {plane: checksums[plane].tolist() for plane in records}

    def __call__(self, plane: str, layer_idx: int, expert_id: int) -> Verify:
        """What raises ArtifactError unless the slab it is given, with its padding, is the one that was written."""
        expected, size = self._expected[plane][layer_idx][expert_id], self._records[plane].slab_bytes
        padding = bytes(self._records[plane].slab_stride_bytes - size)

        def verify(slab: memoryview) -> None:
            found = zlib.crc32(slab[:size])
            if found != expected or slab[size:] != padding:
                what = found if found != expected else "padding that is not zero"
                raise ArtifactError(self._damage(plane, layer_idx, expert_id, what, expected))

        return verify

    def _damage(self, plane: str, layer_idx: int, expert_id: int, found: int | str, expected: int) -> str:
        name, what = expert_file(plane, layer_idx), f"layer {layer_idx} expert {expert_id} {plane}"
        return checksum_damage(self._directory, self._manifest, name, what, found, expected)


def checksum_damage(
    directory: Path,
    manifest: Manifest,
    name: str,
    what: str,
    found: int | str,
    expected: int,
    entry: str | None = None,
) -> str:
    """The line about a part of the file `name` that has not the checksum in CHECKSUMS; it blames CHECKSUMS if that is none.

    Args:
        directory: The model directory.
        manifest: Its manifest.
        name: The file with the part.
        what: The part in words.
        found: Its CRC-32, or what else was found.
        expected: Its checksum in CHECKSUMS.
        entry: Of TABLES the tensor.
    """
    cure = content_remedy(directory, manifest, name, entry)
    if not 0 <= expected < 1 << 32:
        return f"{directory / CHECKSUMS}: checksum of {what} in {name} is {expected}, expected a CRC-32; {cure}"
    found = f"CRC-32 {found:08x}" if isinstance(found, int) else found
    return f"{directory / name}: {what}: {found}, expected CRC-32 {expected:08x}; {cure}"


class SlabFile:
    """A new file of known size, written in whole pages with O_DIRECT from any thread; `finish` or `close` ends it."""

    def __init__(self, path: Path, temporary: Path, size_bytes: int, warn: Warn) -> None:
        """Creates `temporary`; `path` is what errors and warnings call it.

        Raises:
            ArtifactError: The system refused, or there is no room for `size_bytes`.
        """
        self._path, self._warn, self._descriptor = path, warn, -1
        try:
            self._descriptor = self._open(temporary)
            _reserve(self._descriptor, size_bytes)
        except OSError as cause:
            self.close()
            raise writing_failed(path, cause) from cause

    def write(self, block: Tensor, offset_bytes: int) -> None:
        """Writes all of `block`, page-aligned whole pages; ArtifactError if the system refuses."""
        view, done = view_bytes(block), 0
        try:
            while done < len(view):
                done += self._pwrite(view[done:], offset_bytes + done)
        except OSError as cause:
            raise writing_failed(self._path, cause) from cause

    def finish(self) -> None:
        """Returns when all that was written is on the drive; the file is closed."""
        try:
            os.fsync(self._descriptor)
        except OSError as cause:
            raise writing_failed(self._path, cause) from cause
        finally:
            self.close()

    def close(self) -> None:
        """Releases the descriptor; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self, temporary: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(temporary, flags | os.O_DIRECT, 0o644)
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
        self._say_buffered()
        return os.open(temporary, flags, 0o644)

    def _pwrite(self, view: memoryview, offset_bytes: int) -> int:
        try:
            return os.pwrite(self._descriptor, view, offset_bytes)
        except OSError as cause:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            if cause.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._say_buffered()
        return os.pwrite(self._descriptor, view, offset_bytes)

    def _say_buffered(self) -> None:
        self._warn(
            f"{self._path}: the file system refuses O_DIRECT, expected it to write past the page cache; writes are buffered and slower: move the directory to ext4 or xfs"
        )


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Room for the whole file at once: a full disk shows before hours of work, and parallel writes extend nothing."""
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as cause:
        if cause.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size_bytes)


class WriteRing:
    """Hands out blocks to fill and has them written by a pool's threads; a block is handed out again once it is written."""

    def __init__(self, ring: BlockRing, records: Mapping[str, PlaneRecord], pool: Executor) -> None:
        self._records, self._pool = dict(records), pool
        self._free = deque(ring.sets)
        self._under_way: deque[tuple[Blocks, list[Written]]] = deque()

    def take(self, done: Done) -> Blocks:
        """The next blocks; `done` is told of each slab that had to be waited for.

        Raises:
            ArtifactError: A slab could not be written.
        """
        if not self._free:
            self._wait(done)
        return self._free.popleft()

    def write(self, blocks: Blocks, batch: Batch, files: Mapping[str, SlabFile]) -> None:
        """Queues the batch's slabs; `blocks` belong to the ring again."""
        written = [
            self._pool.submit(self._write, files[plane], batch.layer_idx, plane, batch.first + place, block[place])
            for place in range(batch.number)
            for plane, block in blocks.items()
        ]
        self._under_way.append((blocks, written))

    def drain(self, done: Done) -> None:
        """Returns when everything queued is written; as `take`."""
        while self._under_way:
            self._wait(done)

    def abandon(self) -> None:
        """Returns when no thread touches a block or a file any more, whatever came of the writes."""
        for _, written in self._under_way:
            for future in written:
                future.cancel() or future.exception()

    def _wait(self, done: Done) -> None:
        blocks, written = self._under_way[0]
        for future in written:
            done(*future.result())
        self._under_way.popleft()
        self._free.append(blocks)

    def _write(
        self, file: SlabFile, layer_idx: int, plane: str, expert_id: int, block: Tensor
    ) -> tuple[int, str, int, int]:
        file.write(block, expert_id * block.numel())
        return layer_idx, plane, expert_id, zlib.crc32(view_bytes(block)[: self._records[plane].slab_bytes])
