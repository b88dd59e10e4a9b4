"""How fast a drive has been: bytes, reads and the time during which at least one of them was under way. Owns numbers only."""

from __future__ import annotations


class Meter:
    """Bytes, reads and busy time of one kind: time during which at least one of its reads was under way."""

    def __init__(self) -> None:
        self._under_way, self._busy_since = 0, 0.0
        self._bytes = self._reads = self._slabs = self._stalls = 0
        self._busy = self._read_time = self._slab_time = 0.0

    def begin(self, now: float) -> None:
        if not self._under_way:
            self._busy_since = now
        self._under_way += 1

    def end(self, now: float, num_bytes: int, seconds: float) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._busy += now - self._busy_since
        self._bytes += num_bytes
        self._reads += 1
        self._read_time += seconds

    def count_slab(self, seconds: float) -> None:
        self._slabs += 1
        self._slab_time += seconds

    def count_stall(self) -> None:
        self._stalls += 1

    def snapshot(self, now: float) -> dict[str, float]:
        busy = self._busy + (now - self._busy_since if self._under_way else 0.0)
        return {
            "bytes": self._bytes,
            "reads": self._reads,
            "slabs": self._slabs,
            "stalls": self._stalls,
            "busy_seconds": busy,
            "gb_per_second": self._bytes / busy / 1e9 if busy else 0.0,
            "mean_read_ms": self._read_time / self._reads * 1e3 if self._reads else 0.0,
            "mean_slab_ms": self._slab_time / self._slabs * 1e3 if self._slabs else 0.0,
        }
