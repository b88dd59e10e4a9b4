"""How much memory the pools may take: budgets of the user, what is free, what the process holds already, who else is there.

Owns the reserves and the look at the machine; how bytes become slots is `pools`' business.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.errors import StrawError
from runtime.store.arena import available_ram_bytes

WORKSPACE_BYTES = (
    1_500_000_000  # what a card needs beside weights, state and slots: activations, dequantised experts, CUDA
)
SCARCE_BYTES = 200_000_000  # free memory below which the next allocation of anybody may fail
RAM_RESERVE_BYTES = 4_000_000_000
RAM_RESERVE_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that the user grants the whole process on each side; None: what is free, less a reserve."""

    vram_bytes: int | None
    ram_bytes: int | None


def bytes_left(budgets: Budgets, device: torch.device, used_bytes: int) -> tuple[int, int]:
    """(VRAM, RAM) bytes for slots and rings; either may be negative.

    Args:
        budgets: The user's.
        device: Where the slots called VRAM lie. On the CPU one memory plays both parts: without a VRAM budget all of it is "VRAM".
        used_bytes: What weights and state take on the device already; inside the budget.

    Raises:
        StrawError: A budget is more than there is; names the other processes on the card.
    """
    ram = _ram_left(budgets.ram_bytes)
    if device.type != "cpu":
        return _vram_left(budgets.vram_bytes, device, used_bytes), ram
    if budgets.vram_bytes is None:
        return ram, 0
    vram = budgets.vram_bytes - used_bytes
    return vram, ram - max(vram, 0) if budgets.ram_bytes is None else ram


def check_fits(wanted_bytes: int, device: torch.device) -> None:
    """Nothing, if the card has so many bytes free.

    Raises:
        StrawError: It has not; names the processes on it.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if wanted_bytes > free:
        raise StrawError(
            f"slots: {wanted_bytes:,} bytes of VRAM, {free:,} are free on {device}, expected that much;{_other_users()} give fewer --slots or a smaller --vram"
        )


def scarcity_watch(device: torch.device, warn: Callable[[str], None]) -> Callable[[], None]:
    """Looks whether others have taken the memory of card or machine since the start; says so each time it gets scarce."""
    scarce: set[str] = set()

    def watch() -> None:
        for place, free, consequence in _free_bytes(device):
            if free >= SCARCE_BYTES:
                scarce.discard(place)
            elif place not in scarce:
                scarce.add(place)
                warn(f"{place}: only {free:,} bytes of memory are free; {consequence}")

    return watch


def _free_bytes(device: torch.device) -> Iterator[tuple[str, int, str]]:
    yield (
        "RAM",
        available_ram_bytes(),
        "the system may swap or end programs: end others, or start again with a smaller --ram",
    )
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        users = _other_users() if free < SCARCE_BYTES else ""
        yield (
            str(device),
            free,
            f"a driver may now page, and speed fall;{users} end others, or start again with a smaller --vram",
        )


def _ram_left(budget_bytes: int | None) -> int:
    """Bytes of host memory for slots, what the process holds already taken off a budget.

    Raises:
        StrawError: The budget is more than the machine has left.
    """
    available = available_ram_bytes()
    if budget_bytes is None:
        reserve = max(RAM_RESERVE_BYTES, int(available * RAM_RESERVE_SHARE))
        return available - min(reserve, available // 2)  # a small machine can still run a small model
    left = budget_bytes - resident_bytes()
    if left > available:
        raise StrawError(
            f"--ram {budget_bytes:,} bytes: {available:,} are available beside {resident_bytes():,} of this process, expected no more than that; end other programs or give less"
        )
    return left


def resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Anonymous memory of this process: weights, the interpreter, its libraries' heaps."""
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "RssAnon:")


def _vram_left(budget_bytes: int | None, device: torch.device, used_bytes: int) -> int:
    """Bytes of the card's memory for slots, after what the process uses there already.

    Raises:
        StrawError: The budget is more than the card has free.
    """
    free, _ = torch.cuda.mem_get_info(device)
    if budget_bytes is None:
        return free - WORKSPACE_BYTES
    left = budget_bytes - used_bytes
    if left > free:
        raise StrawError(
            f"--vram {budget_bytes:,} bytes: {free:,} are free on {device} beside {used_bytes:,} of this process, expected that much;{_other_users()} end them or give less"
        )
    return left - WORKSPACE_BYTES


def _other_users() -> str:
    """The processes on the cards, as the driver lists them; empty if it cannot say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=False, timeout=5).stdout.split("\n")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    users = "; ".join(line.strip() for line in listed if line.strip())
    return f" on the cards: {users};" if users else ""
