"""Reads slabs from NVMe into memory the caller owns: O_DIRECT, in pieces, by worker threads, demand before prefetch.

Owns queues, workers, descriptors and the measurement of its own rate. Owns neither the memory (`arena`) nor what a
slab means or which one is wanted next. A slab is read in a few aligned pieces, so that one slab alone fills the
drive's queue. Nothing polls: workers sleep on a condition, waiters on a queue of their own.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from runtime.errors import StoreError
from runtime.store.arena import PAGE_BYTES, view_bytes
from runtime.store.meter import Meter
from runtime.store.tickets import Piece, Place, SlabRead, Ticket, Verify

NUM_WORKERS = 16  # reads under way at once; drives gain up to a depth of 16 with MB reads (facts/peers.md)
PIECES = (
    4  # one slab alone gains up to 4 to 8, streams lose beyond 4 (tmpfs, H200 machine; its drive shows no difference)
)
PREFETCH_READS = 4  # of a prefetch under way at once: a demand read finds the drive's queue nearly free
MIN_PIECE_BYTES = 64 * 1024  # below this a read's fixed cost exceeds what another entry in the queue gains
STALL_SECONDS = 2.0
KINDS = ("demand", "prefetch")


class Progress(NamedTuple):
    """Since the start: time with a demand read under way, time with any, and bytes of all reads."""

    demand_busy_seconds: float
    busy_seconds: float
    num_bytes: int


Preadv = Callable[[int, list[memoryview], int], int]
OpenFile = Callable[[Path, int], int]


class _Descriptors:
    """The open files of one worker; beyond `capacity` the one used least recently is closed."""

    def __init__(self, open_file: OpenFile, capacity: int) -> None:
        self._open_file, self._capacity = open_file, capacity
        self._open: dict[tuple[Path, int], int] = {}  # in order of use

    def get(self, file: Path, flags: int) -> int:
        descriptor = self._open.pop((file, flags), -1)
        if descriptor < 0:
            if len(self._open) >= self._capacity:
                os.close(self._open.pop(next(iter(self._open))))
            descriptor = self._open_file(file, os.O_RDONLY | os.O_CLOEXEC | flags)
        self._open[file, flags] = descriptor
        return descriptor

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


class SlabReader:
    """Worker threads that read slabs. Methods may be called from any thread; `close` ends the threads."""

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        num_workers: int = NUM_WORKERS,
        pieces: int = PIECES,
        stall_seconds: float = STALL_SECONDS,
        warn: Callable[[str], None],
        preadv: Preadv = os.preadv,
        open_file: OpenFile = os.open,
    ) -> None:
        """Starts the workers.

        Args:
            directories: Model directories, best on drives of their own. A file that lies in several of them is read
                from all of them at once, one that lies in one is found there.
            num_workers: Reads under way at once, over all directories.
            pieces: Most parts a slab is read in.
            stall_seconds: A single read that takes longer is counted and told to `warn`.
            warn: Takes one line for the user; called from any thread, never with a lock held.
            preadv, open_file: What the system offers; tests give others.
        """
        if not directories or num_workers < 1 or pieces < 1 or stall_seconds <= 0:
            raise ValueError(f"{len(directories)=} {num_workers=} {pieces=} {stall_seconds=}, expected all above 0")
        self._directories, self._pieces, self._stall_seconds = list(directories), pieces, stall_seconds
        self._warn, self._preadv, self._open_file = warn, preadv, open_file
        self._descriptors_each = _descriptor_limit(num_workers)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queues: dict[str, deque[Ticket]] = {kind: deque() for kind in KINDS}
        self._reading: dict[int, Piece] = {}  # by the worker's thread
        self._meters = {kind: Meter() for kind in (*KINDS, "all")}
        self._found: dict[str, list[Place]] = {}
        self._buffered: set[Path] = set()  # directories that refused O_DIRECT
        self._counts = {"buffered_reads": 0, "failed": 0, "cancelled": 0}
        self._turn = 0
        self._broken: BaseException | None = None
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"slab-read-{i}") for i in range(num_workers)]
        for thread in self._threads:
            thread.daemon = True  # a program that dies without `close` must not hang on a drive that does not answer
            thread.start()

    def __enter__(self) -> SlabReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        relative_path: str,
        offset_bytes: int,
        target: memoryview | Tensor,
        *,
        label: str,
        demand: bool = True,
        verify: Verify | None = None,
    ) -> Ticket:
        """Queues the read of `target`'s bytes from `offset_bytes` on; returns at once.

        Args:
            relative_path: A file below one of the directories.
            offset_bytes: Where the slab begins; a multiple of PAGE_BYTES.
            target: Page-aligned memory of whole pages. It is the reader's until the ticket is done.
            label: Names the slab in an error: "layer 3 expert 17 fp4".
            demand: Served before every prefetch; within a kind first come, first served.
            verify: Called by a worker with the whole slab; what it raises comes out of `wait`.

        Raises:
            ValueError: The reader is closed, or something is not aligned. All else comes out of `wait`.
        """
        view = view_bytes(target)
        _check_alignment(view, offset_bytes)
        slab = SlabRead(relative_path, self._locate(relative_path), offset_bytes, view, label, verify)
        ticket = Ticket(self, slab, _piece_bounds(len(view), self._pieces), KINDS[not demand])
        with self._lock:
            problem = self._why_never(ticket)
            if problem is None:
                ticket._turn = self._turn
                self._turn += 1
                self._queues[ticket._kind].append(ticket)
                self._work.notify(len(ticket._bounds) - 1)
        if problem is not None:
            ticket._give_up(self._loss(ticket, problem))
            self._complete(ticket)
        return ticket

    def completed(self, tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """Yields each of `tickets` once it is done, in order of completion; blocks in between.

        The failed and the cancelled are among them: `wait` of a yielded ticket returns or raises at once.
        """
        done: SimpleQueue[Ticket] = SimpleQueue()
        awaited = list(tickets)
        with self._lock:
            for ticket in awaited:
                if ticket._is_done:
                    done.put(ticket)
                else:
                    ticket._watchers.append(done)
        missing = len(awaited)
        while missing:
            try:
                ticket = done.get(timeout=self._stall_seconds)
            except Empty:  # time to say that it takes long, not to give up
                self._report_stalls()
                continue
            missing -= 1
            yield ticket

    def cancel(self, ticket: Ticket) -> bool:
        """True if no byte had been asked for: the ticket is done, `wait` raises and the target is the caller's.

        False if its reading has begun or is over: it goes on as if nothing had been said.
        """
        with self._lock:
            queue = self._queues[ticket._kind]
            if ticket._begun or ticket not in queue:
                return False
            queue.remove(ticket)
            ticket._give_up(self._loss(ticket, "its read was cancelled"))
        self._complete(ticket, "cancelled")
        return True

    def promote(self, ticket: Ticket) -> None:
        """What is left of a prefetch becomes demand, behind the demand reads already queued."""
        with self._lock:
            queue = self._queues[ticket._kind]
            if ticket._kind == "prefetch" and ticket in queue:
                queue.remove(ticket)
                self._queues["demand"].append(ticket)
                self._work.notify(len(ticket._bounds) - 1 - ticket._begun)
            ticket._kind = "demand"

    def stats(self) -> dict[str, Any]:
        """Counters since the start: one dict each for demand, prefetch and all, and what went another way.

        `reads` are pieces; `mean_read_ms` is the time inside the system call, `mean_slab_ms` from submit to done;
        `gb_per_second` counts only `busy_seconds`, the time with at least one read of that kind under way.
        """
        now = time.perf_counter()
        with self._lock:
            counted: dict[str, Any] = {name: meter.snapshot(now) for name, meter in self._meters.items()}
        return counted | self._counts

    def progress(self) -> Progress:
        """How busy the drive has been, in three numbers; cheap enough for every layer."""
        now = time.perf_counter()
        with self._lock:
            demand, both = self._meters["demand"], self._meters["all"]
            return Progress(demand.busy(now), both.busy(now), both.num_bytes)

    def close(self) -> None:
        """Ends the workers after the pieces they are reading; what is queued fails. A second call does nothing.

        A drive that does not answer is not waited for beyond the stall limit: its worker ends with its read, or the program.
        """
        with self._lock:
            self._closed = True
            over = self._drop_queued("the reader was closed before it was read")
            self._work.notify_all()
        for ticket in over:
            self._complete(ticket)
        deadline = time.monotonic() + self._stall_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _locate(self, path: str) -> list[Place]:
        if path not in self._found:
            places = [Place(directory, directory / path) for directory in self._directories]
            found = [place for place in places if place.file.exists()]
            if not found:
                return []  # not remembered: it may appear
            self._found[path] = found
        return self._found[path]

    def _why_never(self, ticket: Ticket) -> str | None:
        """What keeps this ticket from being read, if anything does. With the lock held."""
        if self._closed:
            raise ValueError(f"{ticket._slab.path}: {ticket.label} was asked of a closed reader, expected an open one")
        if self._broken is not None:
            return self._death()
        if not ticket._slab.places:
            places = " or ".join(map(str, self._directories))
            return f"no such file in {places}, expected it there; run: prep verify {self._directories[0]}"
        return None

    def _death(self) -> str:
        return f"a reading thread ended by {self._broken!r}, expected it to run; start the program again"

    def _loss(self, ticket: Ticket, problem: str) -> StoreError:
        return StoreError(f"{self._directories[0] / ticket._slab.path}: {ticket.label}: {problem}")

    def _run(self) -> None:
        descriptors = _Descriptors(self._open_file, self._descriptors_each)
        try:
            while (piece := self._next_piece()) is not None:
                self._end_piece(piece, self._read(piece, descriptors))
        except BaseException as cause:  # whatever ended this worker, those who wait must hear of it
            self._break(cause)
        finally:
            descriptors.close()

    def _next_piece(self) -> Piece | None:
        """The first piece of the first ticket; sleeps while there is none; None when the workers are to end."""
        with self._lock:
            while not (queue := self._next_queue()):
                if self._closed or self._broken is not None:
                    return None
                self._work.wait()
            ticket, now = queue[0], time.perf_counter()
            piece = self._reading[threading.get_ident()] = ticket._begin_piece(now)
            if ticket._is_all_begun():
                queue.popleft()
            for name in (piece.kind, "all"):
                self._meters[name].begin(now)
        return piece

    def _next_queue(self) -> deque[Ticket]:
        """The queue to serve next; empty if there is nothing to read, or only prefetches beyond what may be under way."""
        demand, prefetch = (self._queues[kind] for kind in KINDS)
        return demand if demand or self._meters["prefetch"].under_way >= PREFETCH_READS else prefetch

    def _end_piece(self, piece: Piece, error: BaseException | None) -> None:
        ticket, now = piece.ticket, time.perf_counter()
        num_bytes = 0 if error else len(piece.target)
        with self._lock:
            del self._reading[threading.get_ident()]
            for name in (piece.kind, "all"):
                self._meters[name].end(now, num_bytes, now - piece.begin)
            ticket._ended += 1
            if error is not None:
                ticket._give_up(error)
                with suppress(ValueError):  # not in a queue once its last piece was begun
                    self._queues[ticket._kind].remove(ticket)
            is_over = ticket._is_all_ended()
            has_stalled = self._count_stall(piece, now)
        if is_over:
            self._complete(ticket)
        if has_stalled:
            self._warn(self._stall_message(piece, f"took {now - piece.begin:.2f} s"))

    def _complete(self, ticket: Ticket, failure: str = "failed") -> None:
        """Hands the target back: no worker touches it after this. Called once, by whoever ended the last piece."""
        if ticket._error is None and ticket._slab.verify is not None:
            try:
                ticket._slab.verify(ticket._slab.target)
            except BaseException as cause:  # comes out of `wait`
                ticket._error = cause
        with self._lock:
            seconds = time.perf_counter() - ticket._submitted
            if ticket._error is None:
                for name in (ticket._kind, "all"):
                    self._meters[name].count_slab(seconds)
            else:
                self._counts[failure] += 1
            ticket._is_done = True
            for watcher in ticket._watchers:
                watcher.put(ticket)

    def _break(self, cause: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or cause
            piece = self._reading.get(threading.get_ident())
            over = self._drop_queued(self._death())
            self._work.notify_all()
        for ticket in over:
            self._complete(ticket)
        if piece is not None:
            self._end_piece(piece, self._loss(piece.ticket, self._death()))

    def _drop_queued(self, problem: str) -> list[Ticket]:
        """Fails all that is queued; returns the tickets without a piece under way. With the lock held."""
        dropped = [ticket for queue in self._queues.values() for ticket in queue]
        for ticket in dropped:
            ticket._give_up(self._loss(ticket, problem))
        for queue in self._queues.values():
            queue.clear()
        return [ticket for ticket in dropped if ticket._is_all_ended()]

    def _read(self, piece: Piece, descriptors: _Descriptors) -> StoreError | None:
        """Fills the piece's target; the error, if any, is for those who wait."""
        try:
            if not self._read_direct(piece, descriptors):
                self._read_buffered(piece, descriptors)
        except OSError as cause:
            error = _damage(piece, f"reading failed ({cause.strerror or cause})")
            error.__cause__ = cause
            return error
        except StoreError as error:
            return error
        return None

    def _read_direct(self, piece: Piece, descriptors: _Descriptors) -> bool:
        """False where the file system refuses O_DIRECT, which is said once for each directory."""
        directory, file = piece.place
        if directory in self._buffered:
            return False
        try:
            self._fill(descriptors.get(file, os.O_DIRECT), piece)
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
            self._refuse_direct(directory)
            return False
        return True

    def _read_buffered(self, piece: Piece, descriptors: _Descriptors) -> None:
        descriptor = descriptors.get(piece.place.file, 0)
        self._fill(descriptor, piece)
        # The page cache must not eat the memory that the RAM tier was given.
        os.posix_fadvise(descriptor, piece.offset_bytes, len(piece.target), os.POSIX_FADV_DONTNEED)
        with self._lock:
            self._counts["buffered_reads"] += 1

    def _fill(self, descriptor: int, piece: Piece) -> None:
        done, length = 0, len(piece.target)
        while done < length:
            count = self._preadv(descriptor, [piece.target[done:]], piece.offset_bytes + done)
            if count < PAGE_BYTES:
                raise _damage(piece, f"the file ends at byte {piece.offset_bytes + done + count:,}")
            done += count // PAGE_BYTES * PAGE_BYTES  # a read must begin at a whole page: what is behind it, once more

    def _refuse_direct(self, directory: Path) -> None:
        with self._lock:
            is_first = directory not in self._buffered
            self._buffered.add(directory)
        if is_first:
            self._warn(
                f"{directory}: the file system refuses O_DIRECT, expected it to read past the page cache; reads are buffered and slower: move the directory to ext4 or xfs"
            )

    def _report_stalls(self) -> None:
        now = time.perf_counter()
        with self._lock:
            stalled = [piece for piece in self._reading.values() if self._count_stall(piece, now)]
        for piece in stalled:
            self._warn(self._stall_message(piece, f"has taken {now - piece.begin:.2f} s so far"))

    def _count_stall(self, piece: Piece, now: float) -> bool:
        """True once for each read beyond the limit. With the lock held."""
        if piece.is_reported or now - piece.begin <= self._stall_seconds:
            return False
        piece.is_reported = True
        for name in (piece.kind, "all"):
            self._meters[name].count_stall()
        return True

    def _stall_message(self, piece: Piece, duration: str) -> str:
        return f"{piece.place.file}: a read of {piece.ticket.label} {duration}, expected less than {self._stall_seconds:g} s; is the drive hot, full or in use by another program?"


def _damage(piece: Piece, found: str) -> StoreError:
    slab = piece.ticket._slab
    end = slab.offset_bytes + len(slab.target)
    return StoreError(
        f"{piece.place.file}: {slab.label}: {found}, expected bytes {slab.offset_bytes:,} to {end:,}; run: prep verify {piece.place.directory}"
    )


def _check_alignment(target: memoryview, offset_bytes: int) -> None:
    address = np.frombuffer(target, dtype=np.uint8).__array_interface__["data"][0]
    if target.readonly or not len(target) or address % PAGE_BYTES or len(target) % PAGE_BYTES:
        raise ValueError(f"a target of {len(target):,} bytes at {address:#x}, expected writable whole pages")
    if offset_bytes < 0 or offset_bytes % PAGE_BYTES:
        raise ValueError(f"a slab at byte {offset_bytes:,}, expected a multiple of {PAGE_BYTES}")


def _piece_bounds(num_bytes: int, pieces: int) -> list[int]:
    """Where the pieces begin, and the end: whole pages each, as even as they can be, none below MIN_PIECE_BYTES."""
    count = max(1, min(pieces, num_bytes // MIN_PIECE_BYTES))
    pages = num_bytes // PAGE_BYTES
    return [i * pages // count * PAGE_BYTES for i in range(count + 1)]


def _descriptor_limit(num_workers: int) -> int:
    """Files a worker may keep open so that all of them use at most half of what the process may."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if limit == resource.RLIM_INFINITY else max(1, min(1024, limit // 2 // num_workers))
