"""How fast a drive has been: bytes, reads and the time during which at least one of them was under way. Owns numbers only."""

from __future__ import annotations


class Meter:
    """Bytes, reads and busy time of one kind: time during which at least one of its reads was under way."""

    def __init__(self) -> None:
        self.under_way, self._busy_since = 0, 0.0
        self.num_bytes = self._reads = self._slabs = self._stalls = 0
        self._busy = self._read_time = self._slab_time = 0.0

    def begin(self, now: float) -> None:
        if not self.under_way:
            self._busy_since = now
        self.under_way += 1

    def end(self, now: float, num_bytes: int, seconds: float) -> None:
        self.under_way -= 1
        if not self.under_way:
            self._busy += now - self._busy_since
        self.num_bytes += num_bytes
        self._reads += 1
        self._read_time += seconds

    def count_slab(self, seconds: float) -> None:
        self._slabs += 1
        self._slab_time += seconds

    def count_stall(self) -> None:
        self._stalls += 1

    def busy(self, now: float) -> float:
        """Seconds with at least one read under way."""
        return self._busy + (now - self._busy_since if self.under_way else 0.0)

    def snapshot(self, now: float) -> dict[str, float]:
        busy = self.busy(now)
        return {
            "bytes": self.num_bytes,
            "reads": self._reads,
            "slabs": self._slabs,
            "stalls": self._stalls,
            "busy_seconds": busy,
            "gb_per_second": self.num_bytes / busy / 1e9 if busy else 0.0,
            "mean_read_ms": self._read_time / self._reads * 1e3 if self._reads else 0.0,
            "mean_slab_ms": self._slab_time / self._slabs * 1e3 if self._slabs else 0.0,
        }
