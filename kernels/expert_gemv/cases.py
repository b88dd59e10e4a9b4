"""Cases of the grouped expert GEMV: random slabs of every format in slots, and the matrices they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cases import ONE_ROUNDING, Case
from kernels.expert_gemv import Workspace, add_picks, expert_gemv
from kernels.expert_gemv.reference import Matrices, add_picks_reference, expert_gemv_reference
from kernels.expert_gemv.slabs import ADDRESS_UNIT, FP4, SPLIT, TWO_BIT, Picks, Rows, int2_rows, quad2_rows, split_rows
from kernels.formats import PLANES, Matrix, dequantize_fp4, dequantize_int2, dequantize_quad2, split_slab
from kernels.split import SplitTable, dequantize_base, dequantize_split

HIDDEN, WIDTH, LIMIT = 4096, 2048, 10.0  # V4-Flash
ACTIVATIONS = 3e-4  # relative RMS error of 14 bits under the largest of 32 Gaussian values, twice: 1.0e-4 seen
LEVELS = 1e-3  # with a 2-bit row's levels of 14 bits, and without the product of low bytes: 4.8e-4 seen
EXACT = ("fp4", "int2", "split")  # whose values are whole numbers of few bits
PLANES_OF = {"fp4": ("fp4",), "int2": ("int2",), "quad2": ("quad2",), "base": ("base",), "split": ("base", "residual")}
KIND_OF = {"fp4": FP4, "int2": TWO_BIT, "quad2": TWO_BIT, "base": TWO_BIT, "split": SPLIT}


@dataclass
class Inputs:
    """One call: what `expert_gemv` takes, and how the slabs were made."""

    x: Tensor
    picks: Picks
    rows: Rows
    limit: float
    workspace: Workspace
    out: Tensor
    formats: tuple[str, ...]
    slabs: list[dict[str, Tensor]]  # by plane, of each pick
    tables: tuple[SplitTable, ...]
    levels: Tensor

    def tensors(self) -> list[Tensor]:
        """What a captured call reads anew; slabs are named by `picks`."""
        return [self.x, *self.picks, *self.rows]

    def experts(self) -> list[Matrices]:
        """The picks' matrices in float32."""
        return [self._matrices(pick) for pick in range(len(self.formats))]

    def _matrices(self, pick: int) -> Matrices:
        *_, hidden, width = self.workspace.sizes
        slabs = {name: slab.to(self.x.device) for name, slab in self.slabs[pick].items()}
        parts = {name: split_slab(slab, PLANES[name], hidden, width) for name, slab in slabs.items()}
        w1, w3, w2 = (
            self._matrix(pick, number, {name: part[number] for name, part in parts.items()}) for number in range(3)
        )
        return w1, w3, w2

    def _matrix(self, pick: int, number: int, parts: dict[str, Matrix]) -> Tensor:
        name, normaliser = self.formats[pick], self.picks.normalisers[pick, number]
        if name == "fp4":
            return dequantize_fp4(parts["fp4"])
        if name == "int2":
            return dequantize_int2(parts["int2"], normaliser)
        if name == "quad2":
            return dequantize_quad2(parts["quad2"], self.levels[number], normaliser)
        table = self.tables[number]
        if name == "base":
            return dequantize_base(parts["base"], table)
        return dequantize_split(parts["base"], parts["residual"], table)


def make(
    seed: int,
    device: torch.device,
    formats: tuple[str, ...],
    *,
    hidden: int = HIDDEN,
    width: int = WIDTH,
    tokens: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    pinned: bool = False,
) -> Inputs:
    """Random inputs of one call; pick p has format formats[p] and reads token tokens[p] (0). All formats share one code."""
    generator = torch.Generator(device).manual_seed(seed)
    tables, levels = _split_tables(generator, device), _quad2_levels(generator, device)
    slabs = [_slabs(name, generator, hidden, width, tables) for name in formats]
    if pinned:
        slabs = [{name: slab.cpu().pin_memory() for name, slab in planes.items()} for planes in slabs]
    tokens = tokens or (0,) * len(formats)
    count, num_tokens = len(formats), max(tokens) + 1
    picks = Picks(
        slabs=torch.tensor(
            [_addresses(name, planes) for name, planes in zip(formats, slabs, strict=True)], device=device
        ),
        kinds=torch.tensor([KIND_OF[name] for name in formats], dtype=torch.int32, device=device),
        tokens=torch.tensor(tokens, dtype=torch.int32, device=device),
        weights=0.1 + torch.rand(count, generator=generator, device=device),
        normalisers=_normalisers(formats, generator, device),
    )
    return Inputs(
        x=torch.randn(num_tokens, hidden, generator=generator, device=device).to(dtype),
        picks=picks,
        rows=_rows(formats, tables, levels, device),
        limit=LIMIT,
        workspace=Workspace.allocate(num_tokens, count, hidden, width, device),
        out=torch.full((count, hidden), torch.nan, device=device),
        formats=formats,
        slabs=slabs,
        tables=tables,
        levels=levels,
    )


def cases() -> list[Case]:
    """Six picks of each format, mixed ones, eight tokens, slots in pinned host memory, and the sum over picks."""
    calls = {name: (name,) * 6 for name in PLANES_OF}
    calls["fp4+quad2"] = ("fp4", "fp4", "quad2", "quad2", "quad2", "quad2")
    calls["split+base"] = ("split", "split", "base", "base", "base", "base")
    rows = [_case(f"{name} 6 picks", formats) for name, formats in calls.items()]
    rows.append(_case("fp4 1 pick", ("fp4",)))
    rows.append(_case("fp4 48 picks of 8 tokens", ("fp4",) * 48, tokens=tuple(p // 6 for p in range(48))))
    rows.append(_case("fp4 6 picks pinned", ("fp4",) * 6, pinned=True))
    rows.append(_case("base 6 picks pinned", ("base",) * 6, pinned=True))
    return [*rows, _add_case()]


def reference(inputs: Inputs) -> Tensor:
    """The definition on what the slabs stand for."""
    return expert_gemv_reference(inputs.x, inputs.experts(), inputs.picks.tokens, inputs.picks.weights, inputs.limit)


def run(inputs: Inputs) -> Tensor:
    """The kernels."""
    return expert_gemv(inputs.x, inputs.picks, inputs.rows, inputs.limit, inputs.workspace, inputs.out)


def _case(name: str, formats: tuple[str, ...], *, tokens: tuple[int, ...] | None = None, pinned: bool = False) -> Case:
    read_bytes = sum(PLANES[plane].slab_bytes(HIDDEN, WIDTH) for each in formats for plane in PLANES_OF[each])

    def make_case(seed: int, device: torch.device) -> Inputs:
        return make(seed, device, formats, tokens=tokens, pinned=pinned)

    library = ("torch bf16 matmul", _bfloat16_library()) if name in ("fp4 6 picks", "quad2 6 picks") else None
    if pinned:
        library = ("copy to the card, then compute", _copy_first())
    tolerance = ACTIVATIONS if set(formats) <= set(EXACT) else LEVELS
    return Case("expert_gemv", name, make_case, run, reference, read_bytes, tolerance, library)


def _bfloat16_library() -> Callable[[Inputs], Tensor]:
    """The same experts as dequantised bfloat16 matrices through torch.bmm: three to four times the bytes."""
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def call(inputs: Inputs) -> Tensor:
        if id(inputs) not in held:
            experts = inputs.experts()
            first = torch.stack([torch.cat([w1, w3]) for w1, w3, _ in experts]).bfloat16()
            held[id(inputs)] = first, torch.stack([w2 for _, _, w2 in experts]).bfloat16()
        first, second = held[id(inputs)]
        rows = inputs.x[inputs.picks.tokens.long(), :, None]
        gate, up = torch.bmm(first, rows).float().chunk(2, 1)
        between = torch.nn.functional.silu(gate.clamp(max=inputs.limit)) * up.clamp(-inputs.limit, inputs.limit)
        return torch.bmm(second, (between * inputs.picks.weights[:, None, None]).bfloat16())[..., 0].float()

    return call


def _copy_first() -> Callable[[Inputs], Tensor]:
    """The same call on slots in VRAM that the slabs are copied to first, on the same stream."""
    held: dict[int, Inputs] = {}

    def call(inputs: Inputs) -> Tensor:
        if id(inputs) not in held:
            slots = [{name: slab.to(inputs.x.device) for name, slab in planes.items()} for planes in inputs.slabs]
            addresses = [_addresses(name, planes) for name, planes in zip(inputs.formats, slots, strict=True)]
            picks = inputs.picks._replace(slabs=torch.tensor(addresses, device=inputs.x.device))
            held[id(inputs)] = replace(inputs, picks=picks, slabs=slots)
        for planes, slots_of_pick in zip(inputs.slabs, held[id(inputs)].slabs, strict=True):
            for name, slab in planes.items():
                slots_of_pick[name].copy_(slab, non_blocking=True)
        return run(held[id(inputs)])

    return call


class _Sum(NamedTuple):
    picks: Tensor
    shared: Tensor
    out: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.picks, self.shared]


def _add_case() -> Case:
    def make_case(seed: int, device: torch.device) -> _Sum:
        generator = torch.Generator(device).manual_seed(seed)
        picks = torch.randn(1, 6, HIDDEN, generator=generator, device=device)
        shared = torch.randn(1, HIDDEN, generator=generator, device=device).bfloat16()
        return _Sum(picks, shared, torch.empty_like(shared))

    return Case(
        op="expert_gemv",
        name="add 6 picks and shared",
        make=make_case,
        run=lambda inputs: add_picks(*inputs),
        reference=lambda inputs: add_picks_reference(inputs.picks, inputs.shared, torch.float32),
        read_bytes=(6 * 4 + 2) * HIDDEN,
        tolerance=ONE_ROUNDING,
    )


def _addresses(name: str, planes: dict[str, Tensor]) -> list[int]:
    addresses = [planes[plane].data_ptr() // ADDRESS_UNIT for plane in PLANES_OF[name]]
    return [*addresses, 0][:2]


def _slabs(
    name: str, generator: torch.Generator, hidden: int, width: int, tables: tuple[SplitTable, ...]
) -> dict[str, Tensor]:
    """Random slabs of the planes of one expert, their scales such that outputs are near 1."""
    slabs = {}
    for plane in PLANES_OF[name]:
        size = PLANES[plane].slab_bytes(hidden, width)
        slab = torch.randint(256, (size,), generator=generator, device=generator.device, dtype=torch.uint8)
        for matrix in split_slab(slab, PLANES[plane], hidden, width):
            if plane == "fp4" and matrix.scales is not None:
                matrix.scales.remainder_(5).add_(117)
            if plane == "int2" and matrix.scales is not None:
                matrix.scales.remainder_(32).add_(48)  # E4M3 of 2^-1 to 15
        slabs[plane] = slab
    if name == "split":
        _keep_places(slabs, hidden, width, tables)
    return slabs


def _keep_places(slabs: dict[str, Tensor], hidden: int, width: int, tables: tuple[SplitTable, ...]) -> None:
    """Turns the fourth place of a cell of three, which no encoder writes, into the first."""
    bases, residuals = (split_slab(slabs[plane], PLANES[plane], hidden, width) for plane in PLANES_OF["split"])
    for base, residual, table in zip(bases, residuals, tables, strict=True):
        assert base.scales is not None
        partition = table.partitions[base.scales.long()].repeat_interleave(8, -1)  # one a byte of codes
        for place in range(4):
            cell, code = (base.codes >> 2 * place) & 3, (residual.codes >> 2 * place) & 3
            first = residual.codes & (255 - (3 << 2 * place))
            residual.codes.copy_(torch.where((cell == partition) & (code == 3), first, residual.codes))


def _split_tables(generator: torch.Generator, device: torch.device) -> tuple[SplitTable, SplitTable, SplitTable]:
    def table() -> SplitTable:
        exponents = torch.randint(117, 122, (256,), generator=generator, device=device, dtype=torch.uint8)
        partitions = torch.randint(4, (256,), generator=generator, device=device, dtype=torch.uint8)
        levels = torch.randn(256, 4, generator=generator, device=device).mul(3).sort().values.half()
        return SplitTable(exponents, partitions, levels)

    return table(), table(), table()


def _quad2_levels(generator: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(3, 256, 4, generator=generator, device=device).sort().values.half()


def _rows(
    formats: tuple[str, ...], tables: tuple[SplitTable, SplitTable, SplitTable], levels: Tensor, device: torch.device
) -> Rows:
    if "int2" in formats:
        return int2_rows(device)
    return quad2_rows(levels) if "quad2" in formats else split_rows(tables)


def _normalisers(formats: tuple[str, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """About what makes outputs near 1, for the two codes that have normalisers; 1 elsewhere."""
    sizes = torch.tensor([[{"int2": 0.005, "quad2": 0.02}.get(name, 1.0)] for name in formats], device=device)
    spread = 1 + 0.3 * torch.rand(len(formats), 3, generator=generator, device=device)
    return torch.where(sizes == 1, sizes, sizes * spread)
