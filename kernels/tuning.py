"""Which block sizes a kernel runs with on this card: a table in the repository, else one timing kept in the user's cache.

Configurations change speed alone: a kernel lists only such candidates as give the same bits, and a GPU test holds it to that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

Config = dict[str, int]  # constexpr sizes by name, and num_warps, num_stages
SHIPPED = Path(__file__).parent / "tuned"


def choose(
    op: str, key: str, candidates: Sequence[Config], launch: Callable[[Config], object], device: torch.device
) -> Config:
    """The candidate that this card runs fastest; the first one on a CPU.

    Args:
        op: Operator.
        key: What the choice depends on: shape and format.
        candidates: Configurations of equal results. A stored choice that is no longer among them is timed anew.
        launch: Runs the kernel once; called only when the choice is not stored yet.
        device: Of the inputs.

    Raises:
        RuntimeError: The choice is not stored and a graph is being captured, so nothing can be timed.
    """
    if device.type == "cpu":
        return candidates[0]
    table, name = _table(card_name(device)), f"{op}/{key}"
    if table.get(name) not in candidates:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name}: not tuned yet, and a graph is being captured; call the operator once before")
        table[name] = min(candidates, key=lambda config: _median_ms(lambda: launch(config)))
        save(user_directory(), card_name(device), table)
    return table[name]


def card_name(device: torch.device) -> str:
    """The card's name as a file name: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def user_directory() -> Path:
    """Where choices for cards without a shipped table are kept."""
    return Path.home() / ".cache" / "straw" / "kernels"


def ship(device: torch.device) -> None:
    """Writes all choices known for this card to the table in the repository."""
    save(SHIPPED, card_name(device), _table(card_name(device)))


def save(directory: Path, card: str, table: dict[str, Config]) -> None:
    """Writes a card's choices, sorted by name, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    path, temporary = directory / f"{card}.json", directory / f".{card}.tmp"
    temporary.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


@cache
def _table(card: str) -> dict[str, Config]:
    """The choices known for a card, by operator/key; the user's own come first."""
    table: dict[str, Config] = {}
    for directory in (SHIPPED, user_directory()):
        path = directory / f"{card}.json"
        if path.exists():
            table |= json.loads(path.read_text())
    return table


def _median_ms(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=3, rep=15, return_mode="median"))
