"""What the store counts: where each use was served, what it moved and how long it waited. Owns numbers, makes no decision.

Two windows: since the start, and the last 64 tokens. A use is one pick of one token; it is served by the slowest tier that one
of its planes came from.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from runtime.ladder import Rung

WINDOW_TOKENS = 64


@dataclass(slots=True)
class TokenRecord:
    """One token's uses by (precision, tier), drops, bytes and exposed wait; tokens of one call share the call's bytes."""

    uses: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    wait_ms: float = 0.0

    def add(self, other: TokenRecord) -> None:
        """Adds another record's numbers to these."""
        self.uses += other.uses
        self.bytes += other.bytes
        self.wait_ms += other.wait_ms


class StoreStats:
    """Counters of one store."""

    def __init__(self) -> None:
        self._total, self.num_tokens = TokenRecord(), 0
        self._window: deque[tuple[int, TokenRecord]] = deque()  # (tokens of the call, its record)
        self._open = TokenRecord()
        self._by_layer: dict[int, Counter[str]] = {}
        self._by_rank: dict[int, Counter[str]] = {}
        self._by_plane: dict[str, Counter[str]] = {}
        self.prefetch: Counter[str] = Counter()  # slabs and bytes by what became of them

    def use(self, layer_idx: int, rank: int, rung: Rung, tier: str | None) -> None:
        """One pick was served at `rung` from `tier`, "late" if it was on its way; None if dropped. Rank 0 is the heaviest."""
        name = rung.value if tier is None else f"{rung.value} {tier}"
        self._open.uses[name] += 1
        self._by_layer.setdefault(layer_idx, Counter())[name] += 1
        self._by_rank.setdefault(rank, Counter())[name] += 1

    def move(self, plane: str, kind: str, num_bytes: int, over_pcie: bool) -> None:
        """A slab was moved: kind is read, prefetch, promote, stage or demote."""
        self._by_plane.setdefault(plane, Counter())[kind] += 1
        if kind in ("read", "prefetch"):
            self._open.bytes["NVMe"] += num_bytes
        if over_pcie:
            self._open.bytes["PCIe"] += num_bytes

    def wait(self, seconds: float) -> None:
        """The call stood still for a read."""
        self._open.wait_ms += seconds * 1e3

    def abandon(self) -> None:
        """The forward under way has failed: what it counted belongs to no token."""
        self._open = TokenRecord()

    def end_tokens(self, num_tokens: int) -> None:
        """All layers of so many tokens are done."""
        self._total.add(self._open)
        self.num_tokens += num_tokens
        self._window.append((num_tokens, self._open))
        self._open = TokenRecord()
        while len(self._window) > 1 and sum(count for count, _ in self._window) - self._window[0][0] >= WINDOW_TOKENS:
            self._window.popleft()

    def as_dict(self) -> dict[str, Any]:
        """Both windows per token, each call of the recent one, and the counts by layer, rank and plane since the start."""
        recent = TokenRecord()
        for _, record in self._window:
            recent.add(record)
        return {
            "tokens": self.num_tokens,
            "per_token": _per_token(self._total, self.num_tokens),
            "per_token_recent": _per_token(recent, sum(count for count, _ in self._window)),
            "recent_calls": [_per_token(record, count) | {"tokens": count} for count, record in self._window],
            "hit_rate_vram": _share(self._total.uses, "VRAM"),
            "hit_rate_ram": _share(self._total.uses, "RAM"),
            "prefetch": dict(self.prefetch),
            "by_layer": {str(key): dict(value) for key, value in sorted(self._by_layer.items())},
            "by_rank": {str(key + 1): dict(value) for key, value in sorted(self._by_rank.items())},
            "by_plane": {key: dict(value) for key, value in sorted(self._by_plane.items())},
        }


def _per_token(record: TokenRecord, num_tokens: int) -> dict[str, Any]:
    if not num_tokens:
        return {}
    return {
        "uses": {name: count / num_tokens for name, count in sorted(record.uses.items())},
        "nvme_bytes": record.bytes["NVMe"] / num_tokens,
        "pcie_bytes": record.bytes["PCIe"] / num_tokens,
        "wait_ms": record.wait_ms / num_tokens,
    }


def _share(uses: Counter[str], tier: str) -> float:
    total = uses.total()
    return sum(count for name, count in uses.items() if name.endswith(f" {tier}")) / total if total else 0.0
