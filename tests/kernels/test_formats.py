"""Every code of every format, against values computed here in plain Python; round trips on odd sizes; golden bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.formats import (
    CODES,
    PLANES,
    Matrix,
    dequantize_fp4,
    dequantize_fp8_block,
    dequantize_int2,
    dequantize_quad2,
    e8m0_to_float32,
    pack_codes,
    quantize_fp4,
    quantize_fp8_block,
    split_slab,
    unpack_codes,
)
from kernels.split import SplitTable, cells, dequantize_base, dequantize_split, merge_split, split_fp4

E2M1_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
ODD_SHAPES = ((1, 32), (3, 96), (2, 5, 160), (1, 1, 7, 32))
GOLDEN_BASE = [170, 170, 255, 255, 90, 85, 0, 0]  # codes 0, 0, 1, 1 ... 15, 15 under partition 1
GOLDEN_RESIDUAL = [80, 250, 80, 250, 160, 5, 175, 5]
GOLDEN_FP4 = [255, 255, 255, 238, 238, 221, 204, 171, 9, 33, 67, 84, 101, 102, 119, 119]
GOLDEN_FP4_SCALE = 120


def decode_e4m3(code: int) -> float:
    """The value of an E4M3 (fn) byte from its fields."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


def as_float32(value: float) -> float:
    """value rounded to float32; too large ones become infinite."""
    return float(torch.tensor(value, dtype=torch.float64).float())


def every_pairing(rows: int, codes: int) -> tuple[Tensor, Tensor]:
    """All codes under all of `rows` group bytes: unpacked codes [rows, 32], bytes [rows, 1]."""
    return (torch.arange(32) % codes).to(torch.uint8).repeat(rows, 1), torch.arange(rows, dtype=torch.uint8)[:, None]


def random_bytes(*shape: int, seed: int = 0, top: int = 256) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(top, shape, dtype=torch.uint8, generator=random)


def random_fp4(*shape: int, seed: int = 0) -> Matrix:
    """Random codes and every finite exponent, of an [..., N, K] matrix."""
    *lead, columns = shape
    return Matrix(random_bytes(*lead, columns // 2, seed=seed), random_bytes(*lead, columns // 32, seed=seed, top=255))


def all_exponents_table(seed: int = 0) -> SplitTable:
    """A row for each of the 255 finite exponents and one more, random partitions and levels."""
    random = torch.Generator().manual_seed(seed)
    exponents = torch.cat([torch.arange(255), torch.tensor([130])]).to(torch.uint8)
    return SplitTable(exponents, random_bytes(256, seed=seed, top=4), torch.randn(256, 4, generator=random).half())


def without_minus_zero(codes: Tensor) -> Tensor:
    """Packed FP4 codes with 8 (-0) as 0."""
    unpacked = unpack_codes(codes, 4)
    return pack_codes(unpacked.where(unpacked != 8, 0), 4)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_pack_codes(bits: int, shape: tuple[int, ...]) -> None:
    codes = random_bytes(*shape, top=2**bits)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (*shape[:-1], shape[-1] * bits // 8)
    assert torch.equal(unpack_codes(packed, bits), codes)


def test_pack_codes_order() -> None:
    assert pack_codes(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack_codes(torch.tensor([1, 15], dtype=torch.uint8), 4).tolist() == [0xF1]


def test_e8m0_to_float32() -> None:
    values = e8m0_to_float32(torch.arange(256, dtype=torch.uint8)).tolist()
    assert values[:255] == [math.ldexp(1, byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


def test_dequantize_fp4_every_code_and_exponent() -> None:
    codes, exponents = every_pairing(256, 16)
    values = dequantize_fp4(Matrix(pack_codes(codes, 4), exponents))
    assert values[255].isnan().all()
    for byte in range(255):
        magnitudes = [as_float32(math.ldexp(value, byte - 127)) for value in E2M1_MAGNITUDES]
        assert values[byte, :16].tolist() == magnitudes + [-value for value in magnitudes]
    assert values[127, 8].signbit() and not values[127, 0].signbit()


def test_quantize_fp4_rounds_to_even_and_saturates() -> None:
    weights = torch.zeros(1, 32)
    weights[0, :12] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.9, -0.25, -0.2, -0.75, -5.0])
    matrix = quantize_fp4(weights)
    assert matrix.scales is not None and matrix.scales.tolist() == [[127]]
    assert unpack_codes(matrix.codes, 4)[0, :12].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 0, 0, 10, 14]


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_quantize_fp4_is_idempotent(shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    exact = dequantize_fp4(quantize_fp4(weights))
    again = quantize_fp4(exact)
    assert torch.equal(dequantize_fp4(again), exact)
    assert float((exact - weights).norm() / weights.norm()) < 0.15  # it rounds, it does not replace


def test_fp8_block_every_code_and_exponent() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(128, 128).view(torch.float8_e4m3fn)
    values = dequantize_fp8_block(Matrix(codes.repeat(255, 1), torch.arange(255, dtype=torch.uint8)[:, None]))
    decoded = torch.tensor([decode_e4m3(code) for code in range(256)], dtype=torch.float64)
    scales = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    expected = (decoded * scales[:, None]).float()
    assert torch.equal(values.view(255, 64, 256)[:, 0].nan_to_num(7), expected.nan_to_num(7))
    assert values.isnan().sum() == 255 * 64 * 2


def test_quantize_fp8_block() -> None:
    weights = torch.randn(256, 384, generator=torch.Generator().manual_seed(2))
    weights[:128, :128] = 0
    matrix = quantize_fp8_block(weights)
    exact = dequantize_fp8_block(matrix)
    assert torch.equal(dequantize_fp8_block(quantize_fp8_block(exact)), exact)
    largest = weights.view(2, 128, 3, 128).abs().amax((1, 3))
    assert matrix.scales is not None
    scales = e8m0_to_float32(matrix.scales)
    assert (largest <= 448 * scales).all() and (2 * largest > 448 * scales)[largest > 0].all()
    assert float((exact - weights).norm() / weights.norm()) < 0.03


@pytest.mark.parametrize(
    ("name", "expected"),
    [("fp4", 13_369_344), ("int2", 7_077_888), ("quad2", 7_077_888), ("base", 7_077_888), ("residual", 6_291_456)],
)
def test_slab_bytes(name: str, expected: int) -> None:
    assert PLANES[name].slab_bytes(hidden=4096, width=2048) == expected
    assert PLANES[name].name == name


@pytest.mark.parametrize("name", PLANES)
def test_split_slab_covers_every_byte_in_order(name: str) -> None:
    plane, hidden, width = PLANES[name], 96, 64
    slabs = random_bytes(3, plane.slab_bytes(hidden, width) + 5)
    w1, w3, w2 = split_slab(slabs, plane, hidden, width)
    parts = [part.flatten(1) for matrix in (w1, w3, w2) for part in matrix if part is not None]
    assert torch.equal(torch.cat(parts, 1), slabs[:, :-5])
    assert w1.codes.shape == (3, width, hidden * plane.code_bits // 8) == w3.codes.shape
    assert w2.codes.shape == (3, hidden, width * plane.code_bits // 8)
    assert (w1.scales is None) == (name == "residual")


def test_codes_name_planes_and_tables() -> None:
    for name, code in CODES.items():
        assert all(plane in PLANES for plane in code.planes)
        assert all(tensor.name.startswith(name + ".") for tensor in code.tables)
    shapes = {tensor.name: tensor.sizes(layers=43, experts=256) for code in CODES.values() for tensor in code.tables}
    assert shapes == {
        "int2.normalisers": (43, 256, 3),
        "quad2.levels": (43, 3, 256, 4),
        "quad2.normalisers": (43, 256, 3),
        "split.exponents": (43, 3, 256),
        "split.partitions": (43, 3, 256),
        "split.levels": (43, 3, 256, 4),
    }


def test_dequantize_int2_every_code_and_byte() -> None:
    codes, scales = every_pairing(256, 4)
    matrix = Matrix(pack_codes(codes, 2).expand(2, -1, -1), scales.expand(2, -1, -1))
    values = dequantize_int2(matrix, torch.tensor([1.0, 0.75]))
    for byte in set(range(256)) - {127, 255}:
        expected = [decode_e4m3(byte) * level for level in (-1.5, -0.5, 0.5, 1.5)]
        assert values[0, byte, :4].tolist() == expected
        assert values[1, byte, :4].tolist() == [0.75 * value for value in expected]
    assert values[:, [127, 255]].isnan().all()


def test_dequantize_quad2_every_code_and_byte() -> None:
    codes, rows = every_pairing(256, 4)
    levels = torch.randn(256, 4, generator=torch.Generator().manual_seed(3)).half()
    matrix = Matrix(pack_codes(codes, 2).expand(2, -1, -1), rows.expand(2, -1, -1))
    values = dequantize_quad2(matrix, levels, torch.tensor([1.0, 0.3]))
    assert torch.equal(values[0, :, :4], levels.float())
    assert torch.equal(values[1, :, 28:], levels.float() * 0.3)


def test_dequantize_base_every_code_and_byte() -> None:
    codes, rows = every_pairing(256, 4)
    table = all_exponents_table()
    values = dequantize_base(Matrix(pack_codes(codes, 2), rows), table).double()
    scales = torch.ldexp(torch.ones(256, dtype=torch.float64), table.exponents.int() - 127)
    assert torch.equal(values[:, :4], (table.levels.double() * scales[:, None]).float().double())


def test_cells_are_those_of_the_four_partitions() -> None:
    ordered = [15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    cell, place = cells()
    for partition, sizes in enumerate(((3, 4, 4, 4), (4, 3, 4, 4), (4, 4, 3, 4), (4, 4, 4, 3))):
        expected = [(number, inside) for number, size in enumerate(sizes) for inside in range(size)]
        got = zip(cell[partition, ordered].tolist(), place[partition, ordered].tolist(), strict=True)
        assert list(got) == expected
    assert torch.equal(cell[:, 8], cell[:, 0]) and torch.equal(place[:, 8], place[:, 0])


def test_split_restores_every_code_under_every_exponent_and_partition() -> None:
    codes, exponents = every_pairing(255, 16)
    for partition in range(4):
        table = all_exponents_table()._replace(partitions=torch.full((256,), partition, dtype=torch.uint8))
        matrix = Matrix(pack_codes(codes, 4), exponents)
        base, residual = split_fp4(matrix, exponents, table)
        merged = merge_split(base, residual, table)
        assert torch.equal(merged.codes, without_minus_zero(matrix.codes))
        assert merged.scales is not None and torch.equal(merged.scales, exponents)
        values = dequantize_split(base, residual, table)
        assert torch.equal(values, dequantize_fp4(matrix)) and not values[values == 0].signbit().any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**31))
def test_split_restores_random_matrices(batch: int, rows: int, groups: int, seed: int) -> None:
    matrix, table = random_fp4(batch, rows, 32 * groups, seed=seed), all_exponents_table(seed)
    assert matrix.scales is not None
    base, residual = split_fp4(matrix, matrix.scales, table)
    assert residual.scales is None and base.codes.shape == residual.codes.shape == (batch, rows, 8 * groups)
    merged = merge_split(base, residual, table)
    assert merged.scales is not None and torch.equal(merged.scales, matrix.scales)
    assert torch.equal(merged.codes, without_minus_zero(matrix.codes))


def test_split_restores_an_expert_of_v4_flash() -> None:
    hidden, width, table = 4096, 2048, all_exponents_table()
    slabs = {name: random_bytes(PLANES[name].slab_bytes(hidden, width)) for name in ("fp4", "base", "residual")}
    fp4, base, residual = (split_slab(slab, PLANES[name], hidden, width) for name, slab in slabs.items())
    for exact, *targets in zip(fp4, base, residual, strict=True):
        exact.scales.clamp_(max=254)
        for target, part in zip(targets, split_fp4(exact, exact.scales, table), strict=True):
            target.codes.copy_(part.codes)
            if part.scales is not None:
                target.scales.copy_(part.scales)
    for exact, *parts in zip(fp4, base, residual, strict=True):
        merged = merge_split(*parts, table)
        assert torch.equal(merged.codes, without_minus_zero(exact.codes))
        assert torch.equal(merged.scales, exact.scales)


def test_split_golden_bytes() -> None:
    """The bits of the planes, fixed: a change here needs another byte order in the manifest."""
    matrix = Matrix(torch.arange(16, dtype=torch.uint8)[None] * 17, torch.tensor([[120]], dtype=torch.uint8))
    table = all_exponents_table()._replace(partitions=torch.full((256,), 1, dtype=torch.uint8))
    base, residual = split_fp4(matrix, torch.tensor([[120]], dtype=torch.uint8), table)
    assert base.codes.flatten().tolist() == GOLDEN_BASE
    assert residual.codes.flatten().tolist() == GOLDEN_RESIDUAL


def test_fp4_golden_bytes() -> None:
    matrix = quantize_fp4(torch.linspace(-0.06, 0.05, 32)[None])
    assert matrix.codes.flatten().tolist() == GOLDEN_FP4
    assert matrix.scales is not None and matrix.scales.tolist() == [[GOLDEN_FP4_SCALE]]


def test_split_refuses_damage() -> None:
    matrix, table = random_fp4(4, 64), all_exponents_table()
    assert matrix.scales is not None
    base, residual = split_fp4(matrix, matrix.scales, table)
    nan_row = table._replace(exponents=table.exponents.index_fill(0, torch.tensor([9]), 255))
    with pytest.raises(ValueError, match="exponent byte 255"):
        split_fp4(matrix, matrix.scales, nan_row)
    with pytest.raises(ValueError, match="exponent byte 255"):
        merge_split(base, residual, nan_row)
    with pytest.raises(ValueError, match="exponent byte 255"):
        dequantize_base(base, nan_row)
    with pytest.raises(ValueError, match="partition 4"):
        merge_split(base, residual, table._replace(partitions=table.partitions.index_fill(0, torch.tensor([9]), 4)))
    nan_group = Matrix(matrix.codes, matrix.scales.index_fill(1, torch.tensor([1]), 255))
    with pytest.raises(ValueError, match="4 groups have a row of another exponent"):
        split_fp4(nan_group, matrix.scales, table)
    beyond = Matrix(torch.full_like(residual.codes, 255), None)
    with pytest.raises(ValueError, match="beyond their cell"):
        merge_split(base, beyond, table)


def test_one_damaged_bit_is_seen() -> None:
    """The comparisons above are not blind: any one bit of either plane changes what is restored."""
    matrix, table = random_fp4(1, 32), all_exponents_table()
    assert matrix.scales is not None
    base, residual = split_fp4(matrix, matrix.scales, table)
    for bit in range(8):
        damaged = base._replace(codes=base.codes ^ (torch.arange(8) == 3).to(torch.uint8) << bit)
        try:
            merged = merge_split(damaged, residual, table)
        except ValueError:
            continue
        assert not torch.equal(merged.codes, without_minus_zero(matrix.codes))
