"""The arena without a card; a recorder stands in for CUDA's registration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.errors import StoreError
from runtime.store.arena import PAGE_BYTES, HostArena, available_ram_bytes, view_bytes

GB = 10**9


class Cudart:
    """Records what was registered; answers with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.registered, self.released = code, {}, []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.released.append(address)
        return self.code


def test_blocks_are_page_aligned_zeroed_and_apart() -> None:
    arena = HostArena(5 * PAGE_BYTES - 1)
    blocks = [arena.take(3, 1000), arena.take(1), arena.take(2, PAGE_BYTES)]
    assert [block.shape for block in blocks] == [(3, 1000), (1,), (2, PAGE_BYTES)]
    assert not any(block.data_ptr() % PAGE_BYTES for block in blocks) and not any(block.any() for block in blocks)
    for i, block in enumerate(blocks):
        block.fill_(i + 1)
    assert [int(block.sum()) for block in blocks] == [3000, 2, 3 * 2 * PAGE_BYTES]
    assert arena.num_bytes == 5 * PAGE_BYTES and arena.free_bytes == PAGE_BYTES
    with pytest.raises(ValueError, match="4,097 bytes, the arena has 4,096 of 20,480 left"):
        arena.take(PAGE_BYTES + 1)


def test_views_share_the_memory_and_outlive_the_arena() -> None:
    with HostArena(PAGE_BYTES) as arena:
        block = arena.take(PAGE_BYTES)
    view = view_bytes(block.view(4, 1024))
    view[7] = 9
    assert block[7] == 9 and view_bytes(view).nbytes == PAGE_BYTES and not arena.free_bytes
    with pytest.raises(ValueError, match="left"):
        arena.take(1)


@pytest.mark.parametrize("block", [torch.zeros(8), torch.zeros(8, 8, dtype=torch.uint8)[:, 1:]])
def test_view_bytes_never_copies(block: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected contiguous uint8"):
        view_bytes(block)


def test_registered_once_as_a_whole_and_released() -> None:
    cudart = Cudart()
    with HostArena(3 * PAGE_BYTES + 5, pin=True, cudart=cudart) as arena:
        address = arena.take(1).data_ptr()
        assert arena.is_pinned and cudart.registered == {address: 4 * PAGE_BYTES}
    arena.close()
    assert cudart.released == [address] and not arena.is_pinned


def test_too_little_memory_and_a_refused_registration() -> None:
    with pytest.raises(
        StoreError, match="17,000,001,536 bytes wanted for pools and read buffers, 16,000,000,000 avail"
    ):
        HostArena(17 * GB, available_bytes=16 * GB)
    with pytest.raises(StoreError, match=r"host memory: .* Cannot allocate memory; .* --ram"):
        HostArena(1 << 50, available_bytes=1 << 60)
    with pytest.raises(StoreError, match=r"CUDA refused to register 4,096 bytes \(error 2\).*--ram"):
        HostArena(1, pin=True, cudart=Cudart(code=2))
    with pytest.raises(ValueError, match="at least one"):
        HostArena(0)


@pytest.mark.gpu
def test_copies_from_the_arena_are_those_of_pinned_memory() -> None:
    with HostArena(64 * PAGE_BYTES, pin=True) as arena:
        block = arena.take(2, 32 * PAGE_BYTES).fill_(3)
        assert block.is_pinned()
        copy = block[1].to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert copy.eq(3).all()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_ram_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 32000 kB\nMemAvailable:   20000 kB\nHugePages_Total: 0\n")
    assert available_ram_bytes(proc, cgroups) == 20000 * 1024
    write(proc / "self/cgroup", "1:cpu:/old\n0::/user/run\n")
    write(cgroups / "user/run/memory.max", "max\n")
    assert available_ram_bytes(proc, cgroups) == 20000 * 1024
    write(cgroups / "user/memory.max", "9000000\n")
    write(cgroups / "user/memory.current", "8000000\n")
    write(cgroups / "user/memory.stat", "anon 5\ninactive_file 70\nactive_file 5\n")
    assert available_ram_bytes(proc, cgroups) == 1_000_075
    assert available_ram_bytes() > 0
