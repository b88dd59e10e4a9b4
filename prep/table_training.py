"""Tables of the layers to come, trained by threads while earlier layers are still solved. Owns the reading of samples.

A table depends on its layer alone, so it is the same whichever layers a run works on and on whatever device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from kernels.formats import PLANES, Matrix
from prep.codecs import Matrices, Shape, fp4_matrices, sample_of, train
from prep.slab_io import submit_slab
from prep.solvers.split import exponents_present
from runtime.errors import ArtifactError
from runtime.manifest import PlaneRecord, expert_file
from runtime.store.arena import PAGE_BYTES, HostArena, whole_pages
from runtime.store.reader import SlabReader, Ticket, Verify
from runtime.tables import PROJECTIONS, Tables, layer_tables

LAYERS_AHEAD = (
    2  # trained while one is solved: a layer of V4-Flash takes a fast drive a second, its training 1.5 s of a core
)
TRAINING_THREADS = 2  # of torch in each, beside a GPU: six trainings with all cores each would be in each other's way
SCAN_EXPERTS = 32  # whose scales are in memory at once


class SampleReader:
    """Reads what training needs of a layer: some experts whole, and of all of them the scales."""

    def __init__(
        self,
        reader: SlabReader,
        records: Mapping[str, PlaneRecord],
        shape: Shape,
        num_experts: int,
        verify: Callable[[str, int, int], Verify],
        split_tables: Tables | None,
    ) -> None:
        """`records` are of the planes that FP4 is taken from; `split_tables` as in TABLES, for base and residual."""
        self._reader, self._records, self._shape, self._num_experts = reader, dict(records), shape, num_experts
        self._verify, self._split_tables = verify, split_tables

    def sample(self, layer_idx: int, device: torch.device) -> Matrices:
        """The FP4 matrices of `sample_of`'s experts, on `device`."""
        chosen = sample_of(self._num_experts)
        strides = {plane: record.slab_stride_bytes for plane, record in self._records.items()}
        arena = HostArena(len(chosen) * sum(strides.values()))
        blocks = {plane: arena.take(len(chosen), stride) for plane, stride in strides.items()}
        tickets = [
            submit_slab(self._reader, plane, layer_idx, expert_id, block[place], self._verify)
            for place, expert_id in enumerate(chosen)
            for plane, block in blocks.items()
        ]
        _wait(tickets)
        slabs = {plane: block.to(device) for plane, block in blocks.items()}
        rows = None if self._split_tables is None else layer_tables(self._split_tables, "split", layer_idx)
        on_device = None if rows is None else {name: row.to(device) for name, row in rows.items()}
        return fp4_matrices(slabs, self._shape, on_device)

    def exponents(self, layer_idx: int, device: torch.device) -> Tensor:
        """[3, 256] bool on the CPU: the scale bytes that occur in w1, w3 and w2 of any expert in plane fp4."""
        spans = list(_scale_spans(self._shape))
        arena = HostArena(SCAN_EXPERTS * sum(end - begin for begin, end, _, _ in spans))
        blocks = [arena.take(SCAN_EXPERTS, end - begin) for begin, end, _, _ in spans]
        present = torch.zeros(PROJECTIONS, 256, dtype=torch.bool)
        for first in range(0, self._num_experts, SCAN_EXPERTS):
            experts = range(first, min(first + SCAN_EXPERTS, self._num_experts))
            _wait([self._read_scales(layer_idx, e, spans, [block[e - first] for block in blocks]) for e in experts])
            for projection, ((begin, _, start, size), block) in enumerate(zip(spans, blocks, strict=True)):
                scales = block[: len(experts), start - begin :][:, :size].to(device)
                present[projection] |= exponents_present(scales).cpu()
        return present

    def _read_scales(
        self, layer_idx: int, expert_id: int, spans: Sequence[tuple[int, int, int, int]], targets: Sequence[Tensor]
    ) -> list[Ticket]:
        start = expert_id * self._records["fp4"].slab_stride_bytes
        label = f"layer {layer_idx} expert {expert_id} fp4 scales"
        name = expert_file("fp4", layer_idx)
        return [
            self._reader.submit(name, start + begin, target, label=label, demand=False)
            for (begin, _, _, _), target in zip(spans, targets, strict=True)
        ]


def _scale_spans(shape: Shape) -> Iterator[tuple[int, int, int, int]]:
    """Of w1, w3, w2 in an fp4 slab: whole pages (begin, end) around the scales, and the scales (start, size), in bytes."""
    end = 0
    for _ in range(PROJECTIONS):
        code_bytes, scale_bytes = PLANES["fp4"].matrix_bytes(shape.width, shape.hidden)
        start, end = end + code_bytes, end + code_bytes + scale_bytes
        yield start // PAGE_BYTES * PAGE_BYTES, whole_pages(end), start, scale_bytes


def _wait(tickets: Sequence[Ticket | list[Ticket]]) -> None:
    for ticket in tickets:
        if isinstance(ticket, list):
            _wait(ticket)
        else:
            ticket.wait()


class TableTrainer:
    """Trains layers' tables in order, a few ahead of the one asked for. Use as a context; it ends its threads."""

    def __init__(self, code: str, samples: SampleReader, layers: Sequence[int], device: torch.device) -> None:
        self._code, self._samples, self._device = code, samples, device
        self._rest = list(layers)
        self._jobs: dict[int, Future[Tables]] = {}
        self._layers = ThreadPoolExecutor(LAYERS_AHEAD, thread_name_prefix="train-layer")
        threads = TRAINING_THREADS if device.type == "cuda" else torch.get_num_threads()
        self._projections = ThreadPoolExecutor(
            LAYERS_AHEAD * PROJECTIONS, "train", initializer=lambda: torch.set_num_threads(threads)
        )

    def __enter__(self) -> TableTrainer:
        return self

    def __exit__(self, *ended: object) -> None:
        self._layers.shutdown(cancel_futures=True)
        self._projections.shutdown(cancel_futures=True)

    def tables(self, layer_idx: int) -> Tables:
        """Name -> [3, ...] on the CPU, the tables of one layer without normalisers. Ask for layers in the order given.

        Raises:
            StrawError: The layer's FP4 could not be read, or is damaged.
        """
        while self._rest and len(self._jobs) < 1 + LAYERS_AHEAD:
            ahead = self._rest.pop(0)
            self._jobs[ahead] = self._layers.submit(self._train, ahead)
        return self._jobs.pop(layer_idx).result()

    def _train(self, layer_idx: int) -> Tables:
        if self._code == "int2":
            return {}
        matrices = self._samples.sample(layer_idx, self._device)
        present = self._samples.exponents(layer_idx, self._device) if self._code == "split" else [None] * PROJECTIONS
        try:
            jobs = [
                self._projections.submit(train, self._code, Matrix(*matrix), needed)
                for matrix, needed in zip(matrices, present, strict=True)
            ]
            parts = [job.result() for job in jobs]
        except ValueError as cause:
            raise ArtifactError(
                f"layer {layer_idx}: its FP4 cannot be coded ({cause}), expected a released checkpoint's; fetch that again and lay it out anew"
            ) from cause
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
