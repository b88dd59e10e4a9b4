"""Which block sizes a kernel runs with on this card: a table in the repository, else one timing kept in the user's cache.

Configurations change speed alone: a kernel lists only such candidates as give the same bits, and a GPU test holds it to that.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from kernels.card import card_name
from kernels.timing import CACHE_BYTES, graph_us

Config = dict[str, int]  # constexpr sizes by name, and num_warps, num_stages
SHIPPED = Path(__file__).parent / "tuned"
_asked: set[str] = set()  # names that this process has asked for


def choose(
    op: str, key: str, candidates: Sequence[Config], launch: Callable[[Config], object], device: torch.device
) -> Config:
    """The candidate that this card runs fastest; the first one on a CPU.

    Args:
        op: Operator.
        key: What the choice depends on: shape and format.
        candidates: Configurations of equal results. A stored choice that is not among them does not count.
        launch: Runs the kernel once; called only when no choice is stored yet.
        device: Of the inputs.

    Raises:
        RuntimeError: No choice is stored and a graph is being captured, so nothing can be timed.
        ValueError: A stored table is damaged.
    """
    if device.type == "cpu":
        return candidates[0]
    name, card = f"{op}/{key}", card_name(device)
    _asked.add(name)
    for table in (_shipped(card), _own(card)):
        if table.get(name) in candidates:
            return table[name]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name}: not tuned yet, and a graph is being captured; call the operator once before")
    chosen = min(candidates, key=lambda config: _run_us(lambda: launch(config), device))
    _own(card)[name] = chosen
    _keep(user_directory() / f"{card}.json", {name: chosen})
    return chosen


def user_directory() -> Path:
    """Where choices that no shipped table has are kept."""
    return Path.home() / ".cache" / "straw" / "kernels"


def ship(device: torch.device) -> Path:
    """Writes what this process asked for and this card chose to its table in the repository, over what that had; its path."""
    card = card_name(device)
    path = SHIPPED / f"{card}.json"
    write_table(path, _shipped(card) | {name: config for name, config in _own(card).items() if name in _asked})
    return path


def read_table(path: Path) -> dict[str, Config]:
    """Choices by operator/key; none where there is no file.

    Raises:
        ValueError: The file holds something else.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}), expected a table of block sizes; remove it") from None
    is_table = isinstance(table, dict) and all(
        isinstance(config, dict) and all(isinstance(size, int) for size in config.values()) for config in table.values()
    )
    if not is_table:
        raise ValueError(f"{path}: expected an object of block sizes by operator; remove it")
    return table


def write_table(path: Path, table: dict[str, Config]) -> None:
    """Writes choices, sorted by name, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def _keep(path: Path, choices: dict[str, Config]) -> None:
    """Adds choices to a file that other processes may have changed since it was read."""
    try:
        write_table(path, read_table(path) | choices)
    except OSError as error:
        warnings.warn(
            f"{path}: {error.strerror}, block sizes are timed again in each process; make it writable", stacklevel=2
        )


@cache
def _shipped(card: str) -> dict[str, Config]:
    return read_table(SHIPPED / f"{card}.json")


@cache
def _own(card: str) -> dict[str, Config]:
    """This user's choices, and with them this process's."""
    return read_table(user_directory() / f"{card}.json")


def _run_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of a run out of memory and of what empties the cache before it, the same for every candidate.

    In a graph, since Python takes longer to launch a kernel than many of them take to run.
    """
    other = torch.empty(2 * CACHE_BYTES, dtype=torch.uint8, device=device)

    def run_from_memory() -> None:
        other.zero_()
        run()

    return graph_us([run_from_memory])
