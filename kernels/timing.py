"""Time on the device: replays of a captured graph, over inputs that together pass the cache. Owns no operator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch

CACHE_BYTES = 60_000_000  # of an H200's L2; sets of inputs together are to be four times this
MOST_SETS = 96  # below 2.5 MB a set not all are out of the cache, nor is the yardstick
REPLAY_US = 1000.0  # a graph repeats its runs until it takes about this long
REPLAYS = 25


def num_sets(read_bytes: int) -> int:
    """Sets of inputs that together pass the cache."""
    return max(2, min(MOST_SETS, math.ceil(4 * CACHE_BYTES / max(read_bytes, 1))))


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of `calls`, as the median of replays of a graph that runs them in turn."""
    for call in calls:
        call()  # compiles and tunes
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(REPLAY_US / max(_graph_of(calls, 1)[1], 1.0)))
    graph, _ = _graph_of(calls, rounds)
    times = [_replay_us(graph) for _ in range(REPLAYS)]
    return statistics.median(times) / (rounds * len(calls))


def _graph_of(calls: Sequence[Callable[[], object]], rounds: int) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph of `rounds` times all calls, and what one replay took."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    _replay_us(graph)
    return graph, _replay_us(graph)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def eager_us(call: Callable[[], object]) -> float:
    """Median of three calls launched from Python, for references."""
    call()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)
