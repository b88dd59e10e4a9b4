"""How much of a drive's rate `SlabReader` reaches: `python -m runtime.store.bench_reader DIR` (or /dev/shm: memory).

Inside the timed window: from the release of the first read to the end of the last one that began before the time was
up, with bytes counted only where the whole block or slab arrived; queueing, splitting and waiting for tickets included.
Outside: writing the test file (incompressible bytes, O_DIRECT, synced), opening files, starting threads, touching the
target memory once. The yardstick is the best plain concurrent O_DIRECT read of random aligned blocks over depths 1-32
and 1-16 MiB, with the same file, the same memory and a descriptor per thread; it is read again, in turn with the best
reader setting of each slab, and the shares are medians of these pairs: drives change their rate while one measures.

Table on stderr, one JSON document as the last line of stdout. The file is removed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.measurement import document
from runtime.store.arena import HostArena, view_bytes
from runtime.store.reader import SlabReader

FILE = "straw_bench_reader.bin"
MIB = 1 << 20
DEPTHS = (1, 2, 4, 8, 16, 32)
BLOCKS_MIB = (1, 2, 4, 8, 16)
SLABS_BYTES = {"fp4": 13_369_344, "int2": 7_077_888, "residual": 6_291_456}
PIECES = (1, 2, 4, 8, 16)
WORKERS = (8, 16, 32)
OUTSTANDING = 16  # slabs submitted ahead in a stream; a layer asks for up to 6 experts, and prefetches besides
LAYER = 6  # slabs that one layer waits for together
ROUNDS = 5

Row = dict[str, Any]


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m runtime.store.bench_reader", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the test file is written")
    parser.add_argument("--size-gb", type=float, default=16.0, help="size of the test file")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of each timed window")
    arguments = parser.parse_args()
    results = measure(arguments.directory, int(arguments.size_gb * 1e9), arguments.seconds)
    what = "the slab reader beside the best plain concurrent O_DIRECT read of the same file"
    measured = document(what, "runtime.store.bench_reader", results, arguments.directory)
    sys.stdout.write(json.dumps(measured) + "\n")


def measure(directory: Path, size_bytes: int, seconds: float) -> Row:
    """All results; writes and removes a file of about `size_bytes` in `directory`."""
    overhead = measure_overhead(seconds)
    _say(f"reader alone, reads that take no time: {overhead['pieces_per_second']:,.0f} pieces/s")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / FILE
    pin = torch.cuda.is_available()
    warnings: list[str] = []
    with HostArena(max(DEPTHS) * max(BLOCKS_MIB) * MIB, pin=pin) as arena:
        memory = arena.take(arena.num_bytes).fill_(1)
        try:
            size_bytes, write_rate = write_file(file, size_bytes, memory)
            _say(f"wrote {size_bytes / 1e9:.1f} GB at {write_rate:.2f} GB/s; target memory pinned: {pin}")
            plain = [plain_read(file, memory, depth, block * MIB, seconds) for depth in DEPTHS for block in BLOCKS_MIB]
            best = max(plain, key=_rate)
            _say(f"yardstick: {_describe(best)}")
            slabs = {
                plane: measure_slab(directory, memory, slab_bytes, best, seconds, warnings.append)
                for plane, slab_bytes in SLABS_BYTES.items()
            }
        finally:
            file.unlink(missing_ok=True)
    for message in warnings:
        _say(message)
    return {
        "window": "first read released to last read ended; see the module's docstring",
        "file_bytes": size_bytes,
        "write_gb_per_second": write_rate,
        "pinned": pin,
        "overhead": overhead,
        "plain": plain,
        "yardstick": best,
        "slabs": slabs,
        "warnings": warnings,
    }


def measure_slab(
    directory: Path, memory: Tensor, slab_bytes: int, best_plain: Row, seconds: float, warn: Callable[[str], None]
) -> Row:
    """All settings of the reader for one slab size, then the best one in turn with the yardstick."""

    def read(workers: int, pieces: int, ahead: int, duration: float = seconds) -> Row:
        with SlabReader([directory], num_workers=workers, pieces=pieces, warn=warn) as reader:
            row = stream_slabs(reader, directory / FILE, memory, slab_bytes, ahead, duration)
        return {"workers": workers, "pieces": pieces, **row}

    settings = list(itertools.product(WORKERS, PIECES))
    streams = [read(workers, pieces, OUTSTANDING) for workers, pieces in settings]
    alone = [read(workers, pieces, 1, seconds / 2) for workers, pieces in settings]
    best = max(streams, key=_rate)
    pairs = []
    for _ in range(ROUNDS):
        plain = plain_read(directory / FILE, memory, best_plain["depth"], best_plain["block_bytes"], seconds)
        pairs.append((_rate(plain), _rate(read(best["workers"], best["pieces"], OUTSTANDING))))
    layers = [read(workers, pieces, LAYER) for workers, pieces in settings]
    share = statistics.median(ours / plain for plain, ours in pairs)
    for title, rows in (("stream", streams), (f"{LAYER} ahead", layers), ("1 alone", alone)):
        _say(f"{slab_bytes:>12,} B slabs, {title}: {_describe(max(rows, key=_rate))}")
    _say(f"{slab_bytes:>12,} B slabs: {share:.1%} of the yardstick, median of {ROUNDS} pairs")
    return {
        "slab_bytes": slab_bytes,
        "stream": streams,
        "layer": layers,
        "alone": alone,
        "best": best,
        "pairs_gb_per_second": pairs,
        "share_of_yardstick": share,
    }


def stream_slabs(
    reader: SlabReader, file: Path, memory: Tensor, slab_bytes: int, ahead: int, seconds: float
) -> dict[str, float]:
    """Random slabs with `ahead` of them on their way at any time; a target is reused once its ticket is done."""
    count, generator = file.stat().st_size // slab_bytes, random.Random(0)
    targets = view_bytes(memory)
    latencies: list[float] = []

    def submit(slot: int) -> tuple[Any, int, float]:
        target = targets[slot * slab_bytes : (slot + 1) * slab_bytes]
        offset = generator.randrange(count) * slab_bytes
        now = time.perf_counter()
        return reader.submit(file.name, offset, target, label="benchmark slab"), slot, now

    begin = time.perf_counter()
    pending = deque(submit(slot) for slot in range(ahead))
    while pending:
        ticket, slot, submitted = pending.popleft()
        ticket.wait()
        end = time.perf_counter()
        latencies.append(end - submitted)
        if end - begin < seconds:
            pending.append(submit(slot))
    return {
        "ahead": ahead,
        "slabs": len(latencies),
        "gb_per_second": len(latencies) * slab_bytes / (end - begin) / 1e9,
        "median_ms": statistics.median(latencies) * 1e3,
        "slowest_ms": max(latencies) * 1e3,
    }


def plain_read(file: Path, memory: Tensor, depth: int, block_bytes: int, seconds: float) -> Row:
    """`depth` threads that do nothing but read random aligned blocks, each with its own descriptor and buffer."""
    count, targets = file.stat().st_size // block_bytes, view_bytes(memory)
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for _ in range(depth)]
    start, done, ends = threading.Barrier(depth + 1), [0] * depth, [0.0] * depth

    def read(index: int) -> None:
        target, generator = targets[index * block_bytes : (index + 1) * block_bytes], random.Random(index)
        start.wait()
        while time.perf_counter() < deadline:
            done[index] += os.preadv(descriptors[index], [target], generator.randrange(count) * block_bytes)
        ends[index] = time.perf_counter()

    deadline = float("inf")
    threads = [threading.Thread(target=read, args=(index,)) for index in range(depth)]
    for thread in threads:
        thread.start()
    begin = time.perf_counter()
    deadline = begin + seconds
    start.wait()
    for thread in threads:
        thread.join()
    for descriptor in descriptors:
        os.close(descriptor)
    return {"depth": depth, "block_bytes": block_bytes, "gb_per_second": sum(done) / (max(ends) - begin) / 1e9}


def measure_overhead(seconds: float) -> dict[str, float]:
    """Pieces per second of the reader alone: reads return at once and keep the interpreter, as no real read does."""

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return len(buffers[0])

    def open_file(file: Path, flags: int) -> int:
        return os.open(file, flags & ~os.O_DIRECT)  # /dev refuses it, and it is the ordinary path that is to be timed

    slab_bytes = SLABS_BYTES["fp4"]
    with HostArena(slab_bytes) as arena:
        target = arena.take(slab_bytes)
        with SlabReader([Path("/dev")], preadv=preadv, open_file=open_file, warn=_say) as reader:
            begin = end = time.perf_counter()
            while end - begin < seconds:
                for ticket in [reader.submit("zero", 0, target, label="none") for _ in range(LAYER)]:
                    ticket.wait()
                end = time.perf_counter()
            rate = reader.stats()["all"]["reads"] / (end - begin)
    return {"pieces_per_second": rate, "us_per_piece": 1e6 / rate, "slabs_ahead": LAYER}


def write_file(file: Path, size_bytes: int, memory: Tensor) -> tuple[int, float]:
    """Size and GB/s of a new file of whole 16 MiB blocks of random bytes, synced to the drive."""
    block = view_bytes(memory)[: 16 * MIB]
    block[:] = random.Random(1).randbytes(len(block))
    blocks = max(1, size_bytes // len(block))
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        for index in range(blocks):
            block[:8] = index.to_bytes(8, "little")  # no two blocks alike: some drives store equal ones once
            if os.pwritev(descriptor, [block], index * len(block)) != len(block):
                raise OSError(f"{file}: a block was written in part, expected {len(block):,} bytes; is the disk full?")
        os.fsync(descriptor)
        return blocks * len(block), blocks * len(block) / (time.perf_counter() - begin) / 1e9
    finally:
        os.close(descriptor)


def _rate(row: Row) -> float:
    return row["gb_per_second"]


def _describe(row: Row) -> str:
    how = {name: value for name, value in row.items() if name in ("depth", "block_bytes", "workers", "pieces")}
    latency = f", median {row['median_ms']:.2f} ms" if "median_ms" in row else ""
    return f"{_rate(row):.2f} GB/s{latency} ({', '.join(f'{name} {value}' for name, value in how.items())})"


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")


if __name__ == "__main__":
    main()
