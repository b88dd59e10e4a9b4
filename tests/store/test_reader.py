"""The reader on real temporary files; drives that are slow, refuse or fail are stand-ins for `preadv` and `open`."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import StoreError
from runtime.store.arena import PAGE_BYTES, HostArena
from runtime.store.reader import MIN_PIECE_BYTES, PREFETCH_READS, SlabReader, _piece_bounds

pytestmark = pytest.mark.timeout(20)  # nothing may hang

NAME = "experts/fp4/layer_000.bin"
PAGES = 512
SLAB = 4 * MIN_PIECE_BYTES


def no_warning(message: str) -> None:
    pytest.fail(f"unexpected warning: {message}")


def write_file(directory: Path, content: bytes, name: str = NAME) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return directory


def target_of(num_bytes: int) -> torch.Tensor:
    """Page-aligned memory filled with a byte, so that what was not read shows."""
    return HostArena(num_bytes).take(num_bytes).fill_(0xA5)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


class Drive:
    """A preadv that notes each read's offset, and does at chosen offsets what the test wants."""

    def __init__(self, **at: Callable[[], int | None]) -> None:
        self.at = {int(name.removeprefix("byte_")): action for name, action in at.items()}
        self.offsets: list[int] = []
        self.begun = threading.Event()

    def __call__(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        self.begun.set()
        count = self.at[offset]() if offset in self.at else None
        return os.preadv(descriptor, buffers, offset) if count is None else count


def fail(number: int) -> int:
    raise OSError(number, os.strerror(number))


def raise_error(error: BaseException) -> int:
    raise error


@pytest.fixture(scope="module")
def content() -> bytes:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (PAGES * PAGE_BYTES,), dtype=torch.uint8, generator=generator).numpy().tobytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    return write_file(tmp_path_factory.mktemp("model"), content)


@pytest.fixture
def open_reader(model: Path) -> Iterator[Callable[..., SlabReader]]:
    """Opens readers of `model`; they are closed after the test, and then no thread is left."""
    readers = []

    def build(*directories: Path, **options: object) -> SlabReader:
        options = {"num_workers": 4, "warn": no_warning} | options
        readers.append(SlabReader(list(directories) or [model], **options))
        return readers[-1]

    before = set(threading.enumerate())
    yield build
    for reader in readers:
        reader.close()
    assert not workers_since(before)


def workers_since(before: set[threading.Thread]) -> list[threading.Thread]:
    """Reading threads that are alive and were not in `before`; other tests' sessions may have some of their own."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("slab-read") and thread not in before]


@given(st.data(), st.integers(1, 16), st.integers(1, 8), st.sampled_from([0, 1, 7, 40]))
@settings(max_examples=60, deadline=None)
def test_any_slab_arrives_whole(
    model: Path, content: bytes, data: st.DataObject, pieces: int, workers: int, cut: int
) -> None:
    """Many slabs at once, each its own bytes, also where the system returns less than asked (never past a page)."""
    cuts = itertools.count()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        limit = cut * PAGE_BYTES + 512 * (next(cuts) % 8) if cut else len(buffers[0])
        whole = os.preadv(descriptor, buffers, offset)
        return min(whole, limit)

    places = data.draw(st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, 200)), min_size=1, max_size=8))
    with SlabReader([model], num_workers=workers, pieces=pieces, warn=no_warning, preadv=preadv) as reader:
        slabs = []
        for page, count in places:
            begin, size = page * PAGE_BYTES, min(count, PAGES - page) * PAGE_BYTES
            target = target_of(size)
            slabs.append((reader.submit(NAME, begin, target, label="slab"), begin, target))
        for ticket, begin, target in slabs:
            ticket.wait()
            assert target.numpy().tobytes() == content[begin : begin + len(target)]
        assert reader.stats()["all"]["bytes"] == sum(len(target) for _, _, target in slabs)


@pytest.mark.parametrize(("num_bytes", "pieces"), [(4096, 8), (7_077_888, 4), (13_369_344, 16), (9_953_280, 7)])
def test_pieces_are_whole_pages_and_nearly_even(num_bytes: int, pieces: int) -> None:
    bounds = _piece_bounds(num_bytes, pieces)
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert sum(sizes) == num_bytes and not any(size % PAGE_BYTES for size in sizes)
    assert len(sizes) == (pieces if num_bytes > MIN_PIECE_BYTES else 1)
    assert max(sizes) - min(sizes) <= PAGE_BYTES


def test_reads_past_the_page_cache(open_reader: Callable[..., SlabReader]) -> None:
    direct, warnings = [], []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        direct.append(is_direct(descriptor))
        return os.preadv(descriptor, buffers, offset)

    reader = open_reader(preadv=preadv, warn=warnings.append)
    reader.submit(NAME, 0, target_of(SLAB), label="slab").wait()
    if warnings:
        pytest.skip(f"no O_DIRECT under the temporary directory: {warnings[0]}")
    assert direct == [True] * 4 and reader.stats()["buffered_reads"] == 0


def test_a_mirror_is_read_from_all_its_directories(open_reader: Callable[..., SlabReader], tmp_path: Path) -> None:
    """The copies differ here, so that the bytes tell where they come from: half and half, also slab by slab."""
    copies = [write_file(tmp_path / name, name.encode() * SLAB) for name in "xy"]
    for pieces in (4, 1):
        reader = open_reader(*copies, pieces=pieces)
        targets = [target_of(SLAB) for _ in range(2)]
        for target in targets:
            reader.submit(NAME, 0, target, label="slab").wait()
        from_x = [int(target.eq(ord("x")).sum()) for target in targets]
        assert sorted(from_x) == ([SLAB // 2, SLAB // 2] if pieces == 4 else [0, SLAB])


def test_layers_spread_over_two_directories_are_found(open_reader: Callable[..., SlabReader], tmp_path: Path) -> None:
    first = write_file(tmp_path / "a", b"1" * SLAB, "experts/fp4/layer_001.bin")
    second = write_file(tmp_path / "b", b"2" * SLAB, "experts/fp4/layer_002.bin")
    reader = open_reader(first, second)
    for layer_idx in (1, 2):
        target = target_of(SLAB)
        reader.submit(f"experts/fp4/layer_00{layer_idx}.bin", 0, target, label="slab").wait()
        assert target.eq(ord(str(layer_idx))).all()


def test_beyond_4_gib(open_reader: Callable[..., SlabReader], tmp_path: Path, content: bytes) -> None:
    path, begin = write_file(tmp_path, b"") / NAME, (9 << 29) + PAGE_BYTES
    os.truncate(path, begin + 3 * SLAB)  # sparse
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content[:SLAB])
    target = target_of(SLAB)
    open_reader(tmp_path).submit(NAME, begin, target, label="slab").wait()
    assert target.numpy().tobytes() == content[:SLAB]


def test_demand_goes_before_prefetch(open_reader: Callable[..., SlabReader]) -> None:
    """One worker held by a slow read; then demand in order, prefetch in order, the promoted one behind the demand."""
    gate = threading.Event()
    drive = Drive(byte_0=lambda: None if gate.wait() else 0)
    reader = open_reader(num_workers=1, preadv=drive)
    tickets = [reader.submit(NAME, 0, target_of(PAGE_BYTES), label="slow")]
    drive.begun.wait()
    for page, demand in ((1, False), (2, False), (3, True), (4, False), (5, True)):
        ticket = reader.submit(NAME, page * PAGE_BYTES, target_of(PAGE_BYTES), label=f"{page}", demand=demand)
        tickets.append(ticket)
    reader.promote(tickets[4])
    assert reader.cancel(tickets[2]) and not reader.cancel(tickets[2]) and not reader.cancel(tickets[0])
    assert tickets[2].is_done() and not tickets[0].is_done()
    gate.set()
    order = [ticket.label for ticket in reader.completed(tickets)]
    assert drive.offsets == [page * PAGE_BYTES for page in (0, 3, 5, 4, 1)]
    assert order == ["2", "slow", "3", "5", "4", "1"]
    with pytest.raises(StoreError, match="2: its read was cancelled"):
        tickets[2].wait()
    stats = reader.stats()
    assert (stats["demand"]["slabs"], stats["prefetch"]["slabs"], stats["cancelled"], stats["failed"]) == (4, 1, 1, 0)


def test_a_begun_prefetch_is_promoted_but_not_cancelled(open_reader: Callable[..., SlabReader]) -> None:
    gate = threading.Event()
    drive = Drive(byte_0=lambda: None if gate.wait() else 0)
    reader = open_reader(num_workers=1, preadv=drive)
    prefetch = reader.submit(NAME, 0, target_of(SLAB), label="begun", demand=False)
    drive.begun.wait()
    other = reader.submit(NAME, SLAB, target_of(PAGE_BYTES), label="other", demand=False)
    assert not reader.cancel(prefetch)
    reader.promote(prefetch)
    gate.set()
    assert [ticket.label for ticket in reader.completed([other, prefetch])] == ["begun", "other"]
    reader.promote(prefetch)  # of one that is over: nothing
    assert reader.stats()["demand"]["reads"] == 3  # the first piece was read as a prefetch


def test_prefetches_keep_to_their_share_until_they_are_promoted(open_reader: Callable[..., SlabReader]) -> None:
    gate, under_way = threading.Event(), threading.Semaphore(0)

    def preadv(descriptor: int, targets: list[memoryview], offset: int) -> int:
        under_way.release()
        gate.wait()
        return os.preadv(descriptor, targets, offset)

    reader = open_reader(num_workers=12, pieces=1, preadv=preadv)
    tickets = [
        reader.submit(NAME, page * PAGE_BYTES, target_of(PAGE_BYTES), label="guess", demand=False) for page in range(10)
    ]
    assert all(under_way.acquire(timeout=10) for _ in range(PREFETCH_READS))
    assert not under_way.acquire(timeout=0.2)
    for ticket in tickets:
        reader.promote(ticket)
    assert all(under_way.acquire(timeout=10) for _ in range(len(tickets) - PREFETCH_READS))
    gate.set()
    assert len(list(reader.completed(tickets))) == len(tickets)


def test_completed_yields_the_fast_before_the_slow(open_reader: Callable[..., SlabReader]) -> None:
    gate = threading.Event()
    reader = open_reader(preadv=Drive(byte_0=lambda: None if gate.wait() else 0))
    slow, fast = (reader.submit(NAME, begin, target_of(SLAB), label="slab") for begin in (0, SLAB))
    done = reader.completed([slow, fast])
    assert next(done) is fast and not slow.is_done()
    gate.set()
    assert next(done) is slow
    assert list(reader.completed([fast, slow])) == [fast, slow] and list(reader.completed([])) == []


def test_an_error_on_one_read_hits_only_its_slab(open_reader: Callable[..., SlabReader], content: bytes) -> None:
    reader = open_reader(preadv=Drive(**{f"byte_{SLAB + SLAB // 2}": lambda: fail(errno.EIO)}))
    targets = [target_of(SLAB) for _ in range(3)]
    tickets = [
        reader.submit(NAME, i * SLAB, target, label=f"layer 0 expert {i} fp4") for i, target in enumerate(targets)
    ]
    with pytest.raises(StoreError) as caught:
        tickets[1].wait()
    for part in (NAME, "layer 0 expert 1 fp4", "Input/output error", f"{SLAB:,} to {2 * SLAB:,}", "prep verify"):
        assert part in str(caught.value)
    for i in (0, 2):
        tickets[i].wait()
        assert targets[i].numpy().tobytes() == content[i * SLAB : (i + 1) * SLAB]
    assert reader.stats()["failed"] == 1


def test_a_failed_slab_stays_the_readers_until_its_last_read_ended(open_reader: Callable[..., SlabReader]) -> None:
    gate, failed = threading.Event(), threading.Event()

    def fail_late() -> int:
        failed.set()
        return fail(errno.EIO)

    piece = SLAB // 4
    drive = Drive(**{"byte_0": lambda: None if gate.wait() else 0, f"byte_{piece}": fail_late})
    reader = open_reader(num_workers=2, preadv=drive)
    ticket = reader.submit(NAME, 0, target_of(SLAB), label="slab")
    failed.wait()
    reader.submit(NAME, SLAB, target_of(PAGE_BYTES), label="next").wait()
    assert not ticket.is_done()
    gate.set()
    with pytest.raises(StoreError, match="Input/output error"):
        ticket.wait()
    assert sorted(drive.offsets) == [0, piece, SLAB]  # the rest of the slab is not read any more


def test_end_of_file(open_reader: Callable[..., SlabReader]) -> None:
    reader = open_reader()
    beyond = reader.submit(NAME, (PAGES - 1) * PAGE_BYTES, target_of(2 * PAGE_BYTES), label="layer 0 expert 9 fp4")
    with pytest.raises(StoreError, match=rf"expert 9 fp4: the file ends at byte {PAGES * PAGE_BYTES:,}, expected"):
        beyond.wait()


@pytest.mark.parametrize("left", [SLAB, SLAB + 1000, SLAB // 2 + 5000])
def test_a_file_truncated_while_running(open_reader: Callable[..., SlabReader], tmp_path: Path, left: int) -> None:
    path = write_file(tmp_path, bytes(4 * SLAB)) / NAME
    reader = open_reader(tmp_path, warn=lambda message: None)
    reader.submit(NAME, SLAB, target_of(SLAB), label="before").wait()
    os.truncate(path, left)
    with pytest.raises(StoreError, match=r"layer_000.bin: after: the file ends at byte"):
        reader.submit(NAME, SLAB, target_of(SLAB), label="after").wait()


def test_a_missing_file(open_reader: Callable[..., SlabReader], tmp_path: Path) -> None:
    reader = open_reader()
    lost = reader.submit("experts/int2/layer_000.bin", 0, target_of(SLAB), label="layer 0 expert 1 int2")
    with pytest.raises(StoreError, match=r"experts/int2/layer_000.bin: layer 0 expert 1 int2: no such file in"):
        lost.wait()
    assert not reader.cancel(lost)
    late = open_reader(write_file(tmp_path, bytes(SLAB)), open_file=lambda path, flags: fail(errno.ENOENT))
    with pytest.raises(StoreError, match="No such file"):
        late.submit(NAME, 0, target_of(SLAB), label="slab").wait()


@pytest.mark.parametrize("error", [RuntimeError("bug"), SystemExit()], ids=repr)
def test_a_dead_worker_is_heard_by_all_who_wait(open_reader: Callable[..., SlabReader], error: BaseException) -> None:
    gate = threading.Event()

    def die() -> int:
        gate.wait()
        return raise_error(error)

    drive = Drive(byte_0=die)
    reader = open_reader(num_workers=1, preadv=drive)
    tickets = [
        reader.submit(NAME, i * SLAB, target_of(SLAB), label=f"expert {i}", demand=i < 2, verify=None) for i in range(3)
    ]
    gate.set()
    tickets.append(reader.submit(NAME, 3 * SLAB, target_of(SLAB), label="expert 3"))
    for i, ticket in enumerate(tickets):
        with pytest.raises(StoreError, match=rf"{NAME}: expert {i}: a reading thread ended by"):
            ticket.wait()
    with pytest.raises(StoreError, match="start the program again"):
        reader.submit(NAME, 0, target_of(SLAB), label="later").wait()


def test_a_worker_killed_in_its_sleep(open_reader: Callable[..., SlabReader]) -> None:
    before = set(threading.enumerate())
    reader = open_reader(num_workers=1)
    reader.submit(NAME, 0, target_of(SLAB), label="before").wait()
    (worker,) = workers_since(before)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(SystemExit))
    with pytest.raises(StoreError, match="a reading thread ended by SystemExit"):
        reader.submit(NAME, 0, target_of(SLAB), label="after").wait()


def test_other_workers_end_what_they_began_when_one_dies(open_reader: Callable[..., SlabReader]) -> None:
    gate = threading.Event()
    drive = Drive(**{"byte_0": lambda: None if gate.wait() else 0, f"byte_{SLAB}": lambda: raise_error(KeyError("x"))})
    reader = open_reader(num_workers=2, pieces=1, preadv=drive)
    good, bad = (reader.submit(NAME, begin, target_of(SLAB), label="slab") for begin in (0, SLAB))
    with pytest.raises(StoreError, match="KeyError"):
        bad.wait()
    gate.set()
    good.wait()


def test_open_refuses_o_direct(open_reader: Callable[..., SlabReader], content: bytes) -> None:
    warnings: list[str] = []

    def open_file(path: Path, flags: int) -> int:
        return fail(errno.EINVAL) if flags & os.O_DIRECT else os.open(path, flags)

    check_buffered(open_reader(open_file=open_file, warn=warnings.append), warnings, content)


def test_the_first_read_refuses_o_direct(open_reader: Callable[..., SlabReader], content: bytes) -> None:
    warnings: list[str] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return fail(errno.EINVAL) if is_direct(descriptor) else os.preadv(descriptor, buffers, offset)

    check_buffered(open_reader(preadv=preadv, warn=warnings.append), warnings, content)


def check_buffered(reader: SlabReader, warnings: list[str], content: bytes) -> None:
    """Said once, counted each time, and the bytes are right."""
    for _ in range(2):
        target = target_of(SLAB)
        reader.submit(NAME, SLAB, target, label="slab").wait()
        assert target.numpy().tobytes() == content[SLAB : 2 * SLAB]
    assert len(warnings) == 1 and "refuses O_DIRECT" in warnings[0]
    assert reader.stats()["buffered_reads"] == 8


def test_invalid_also_without_o_direct_is_an_error(open_reader: Callable[..., SlabReader]) -> None:
    reader = open_reader(preadv=Drive(byte_0=lambda: fail(errno.EINVAL)), warn=lambda message: None)
    with pytest.raises(StoreError, match="Invalid argument"):
        reader.submit(NAME, 0, target_of(PAGE_BYTES), label="slab").wait()


def test_a_stall_is_told_while_it_lasts(open_reader: Callable[..., SlabReader]) -> None:
    """The read ends only once the warning has been given."""
    told = threading.Event()
    warnings: list[str] = []

    def warn(message: str) -> None:
        warnings.append(message)
        told.set()

    drive = Drive(byte_0=lambda: None if told.wait() else 0)
    reader = open_reader(preadv=drive, stall_seconds=0.05, warn=warn)
    ticket = reader.submit(NAME, 0, target_of(PAGE_BYTES), label="layer 0 expert 0 fp4")
    ticket.wait()
    assert (
        "expert 0 fp4 has taken" in warnings[0] and NAME in warnings[0] and "expected less than 0.05 s" in warnings[0]
    )
    assert len(warnings) == 1 and reader.stats()["demand"]["stalls"] == 1


def test_a_stall_nobody_waited_for_is_told_at_its_end(open_reader: Callable[..., SlabReader]) -> None:
    warnings: list[str] = []
    told = threading.Event()

    def warn(message: str) -> None:
        warnings.append(message)
        told.set()

    never = threading.Event()
    drive = Drive(byte_0=lambda: None if not never.wait(0.03) else 0)
    reader = open_reader(preadv=drive, stall_seconds=0.02, warn=warn)
    reader.submit(NAME, 0, target_of(PAGE_BYTES), label="slab", demand=False)
    told.wait()
    assert " took " in warnings[0] and reader.stats()["prefetch"]["stalls"] == 1


def test_verify_sees_the_whole_slab_and_its_error_comes_out_of_wait(
    open_reader: Callable[..., SlabReader], content: bytes
) -> None:
    reader = open_reader()
    seen: list[bytes] = []
    reader.submit(NAME, 0, target_of(SLAB), label="slab", verify=lambda slab: seen.append(bytes(slab))).wait()
    assert seen == [content[:SLAB]]
    damaged = StoreError("slab: CRC-32 1, expected 2")
    ticket = reader.submit(NAME, 0, target_of(SLAB), label="slab", verify=lambda slab: raise_error(damaged) and None)
    for _ in range(2):
        with pytest.raises(StoreError, match="CRC-32 1"):
            ticket.wait()


def test_close_fails_what_is_queued_and_leaves_nothing_open(model: Path) -> None:
    before = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    gate = threading.Event()
    drive = Drive(byte_0=lambda: None if gate.wait() else 0)
    reader = SlabReader([model], num_workers=1, pieces=1, warn=no_warning, preadv=drive)
    begun, queued = (reader.submit(NAME, begin, target_of(SLAB), label="slab") for begin in (0, SLAB))
    drive.begun.wait()
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(StoreError, match="the reader was closed before it was read"):
        queued.wait()
    gate.set()
    begun.wait()
    closing.join()
    reader.close()
    with pytest.raises(ValueError, match="closed reader"):
        reader.submit(NAME, 0, target_of(SLAB), label="slab")
    assert not workers_since(before)
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_more_files_than_descriptors(model: Path, content: bytes) -> None:
    """86 layer files times 16 workers exceed the usual limit of 1024: each worker keeps its share open."""
    names = [f"experts/fp4/many_{i:03d}.bin" for i in range(40)]
    for i, name in enumerate(names):
        write_file(model, content[i * PAGE_BYTES : (i + 1) * PAGE_BYTES], name)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
    try:
        reader = SlabReader([model], num_workers=2, warn=no_warning)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with reader:
        for i in [*range(40), *range(40)]:
            target = target_of(PAGE_BYTES)
            reader.submit(names[i], 0, target, label="slab").wait()
            assert target.numpy().tobytes() == content[i * PAGE_BYTES : (i + 1) * PAGE_BYTES]
        assert len(os.listdir("/proc/self/fd")) <= before + 20  # noqa: PTH208


def test_unaligned_requests_are_the_callers_mistake(open_reader: Callable[..., SlabReader]) -> None:
    reader, target = open_reader(), target_of(SLAB + PAGE_BYTES)
    for offset, wrong in ((1, target), (-PAGE_BYTES, target), (0, target[1 : PAGE_BYTES + 1]), (0, target[:1000])):
        with pytest.raises(ValueError, match="expected"):
            reader.submit(NAME, offset, wrong, label="slab")
    with pytest.raises(ValueError, match="writable"):
        reader.submit(NAME, 0, memoryview(bytes(PAGE_BYTES)), label="slab")
    with pytest.raises(ValueError, match="expected all above 0"):
        SlabReader([], warn=no_warning)
