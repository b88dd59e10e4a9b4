"""One page-aligned piece of host memory, cut into pinned RAM slots and read buffers.

Owns the allocation and its registration with CUDA; owns neither what lies in a block nor when it may be overwritten.
It stands in for torch's pinned allocator, which rounds each block up to a power of two: 20.97 GB for the article's
16.71 GB of slots. Blocks are handed out once and never taken back: the pools of a run are cut at its start.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from runtime.errors import StoreError

PAGE_BYTES = 4096  # what O_DIRECT asks of addresses, offsets and lengths
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every card, not for the current one only


class HostArena:
    """`num_bytes` of zeroed host memory, rounded up to whole pages; `take` cuts blocks from it, one behind another.

    Without `pin` pages cost memory only once they are touched. With `pin` they are all claimed at once, and copies
    to and from a card can be asynchronous.
    """

    def __init__(
        self, num_bytes: int, *, pin: bool = False, available_bytes: int | None = None, cudart: Any = None
    ) -> None:
        """Allocates, and registers with CUDA where `pin` is set.

        Args:
            num_bytes: Sum of all blocks, each rounded up to PAGE_BYTES.
            pin: Register the memory with CUDA until `close`.
            available_bytes: What the machine can give; by default asked from the system.
            cudart: The CUDA runtime; by default torch's.

        Raises:
            StoreError: There is not enough memory, or CUDA refused to register it.
        """
        if num_bytes <= 0:
            raise ValueError(f"an arena of {num_bytes} bytes, expected at least one")
        self.num_bytes, self._taken_bytes, self._cudart = whole_pages(num_bytes), 0, None
        available = available_ram_bytes() if available_bytes is None else available_bytes
        if self.num_bytes > available:
            raise _too_large(self.num_bytes, f"{available:,} available")
        self._bytes = self._allocate()
        if pin:
            self._register(torch.cuda.cudart() if cudart is None else cudart)

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_pinned(self) -> bool:
        """Whether the memory is registered with CUDA at the moment."""
        return self._cudart is not None

    @property
    def free_bytes(self) -> int:
        """What `take` can still hand out."""
        return self.num_bytes - self._taken_bytes

    def take(self, *shape: int) -> Tensor:
        """A block of its own: uint8 of `shape`, contiguous, beginning at a whole page. It is the caller's for good.

        Raises:
            ValueError: The arena has less left: it was allocated for other blocks than these.
        """
        size = prod(shape)
        if whole_pages(size) > self.free_bytes:
            raise ValueError(f"a block of {size:,} bytes, the arena has {self.free_bytes:,} of {self.num_bytes:,} left")
        begin = self._taken_bytes
        self._taken_bytes += whole_pages(size)
        return self._bytes[begin : begin + size].view(shape)

    def close(self) -> None:
        """Ends the registration; a second call does nothing. No copy to or from a card may be under way.

        Blocks stay valid as ordinary memory: the pages go back to the system with the last tensor that shows them.
        """
        cudart, self._cudart = self._cudart, None
        if cudart is not None:
            code = int(cudart.cudaHostUnregister(self._bytes.data_ptr()))
            if code:
                raise StoreError(
                    f"pinned memory: CUDA did not release {self.num_bytes:,} bytes (error {code}), expected success; an earlier error on the card? see the messages before this one"
                )
        self._bytes, self._taken_bytes = self._bytes[:0], self.num_bytes

    def _allocate(self) -> Tensor:
        try:
            memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, MemoryError) as cause:
            raise _too_large(self.num_bytes, str(cause)) from cause
        # Huge pages make pinning and each O_DIRECT read cheaper; a kernel without them says EINVAL and loses nothing.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)  # holds `memory` as long as a view lives

    def _register(self, cudart: Any) -> None:
        # In one call: a copy that crosses from one registered range into the next is not promised to work.
        code = int(cudart.cudaHostRegister(self._bytes.data_ptr(), self.num_bytes, CUDA_HOST_REGISTER_PORTABLE))
        if code:
            raise StoreError(
                f"pinned memory: CUDA refused to register {self.num_bytes:,} bytes (error {code}), expected success; give a smaller --ram"
            )
        self._cudart = cudart


def view_bytes(block: Tensor | memoryview) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor or of a buffer, flat; shares its memory and never copies.

    Raises:
        ValueError: The tensor is on a card, of another dtype or with gaps.
    """
    if isinstance(block, memoryview):
        return block.cast("B")
    if block.device.type != "cpu" or block.dtype != torch.uint8 or not block.is_contiguous():
        raise ValueError(f"a {block.dtype} tensor on {block.device}, expected contiguous uint8 in host memory")
    return block.view(-1).numpy().data


def whole_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to a multiple of PAGE_BYTES."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def available_ram_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated without swapping, the limits of the control groups around us taken into account."""
    meminfo = _fields(proc / "meminfo")
    available = meminfo["MemAvailable:"] * 1024
    own = next((line[3:] for line in _lines(proc / "self" / "cgroup") if line.startswith("0::")), "/")
    group = cgroups / own.strip("/")
    for directory in (group, *group.parents):
        if directory.is_relative_to(cgroups):
            available = min(available, _group_headroom(directory, available))
    return available


def _group_headroom(group: Path, unlimited: int) -> int:
    limit = "".join(_lines(group / "memory.max")[:1])
    if not limit.isdigit():  # "max", or no such file: the group sets no limit
        return unlimited
    used = int("".join(_lines(group / "memory.current")[:1]) or 0)
    pages = _fields(group / "memory.stat")
    reclaimable = pages.get("active_file", 0) + pages.get("inactive_file", 0)
    return max(0, int(limit) - used + reclaimable)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def _too_large(num_bytes: int, found: str) -> StoreError:
    return StoreError(
        f"host memory: {num_bytes:,} bytes wanted for pools and read buffers, {found}; end other programs or give a smaller --ram"
    )
