"""What the expert GEMV multiplies: bytes out of codes, whole levels, activations as two bytes."""

from __future__ import annotations

import pytest
import torch
from ptx import outputs_of
from torch import Tensor

from kernels.expert_gemv import decode
from kernels.expert_gemv.packing import allocate_packed, pack_kernel
from kernels.expert_gemv.slabs import quad2_rows, split_rows
from kernels.formats import E2M1_VALUES
from kernels.split import ORDERED_CODES, SplitTable

CPU = torch.device("cpu")


def test_the_assembly_makes_every_weight_exactly() -> None:
    """Of random words: the instructions themselves, run one by one."""
    generator = torch.Generator().manual_seed(0)
    levels = quad2_rows(torch.randn(3, 256, 4, generator=generator).half()).levels
    partitions = torch.arange(4, dtype=torch.uint8).repeat(64)
    table = SplitTable(torch.full((256,), 120, dtype=torch.uint8), partitions, torch.zeros(256, 4).half())
    selectors = split_rows((table, table, table)).split_selectors[0, :4].tolist()
    for words in torch.randint(2**32, (8, 2), generator=generator).tolist():
        _check_decoders(words, levels)
        _check_split(words, selectors)


def test_levels_keep_fourteen_bits_and_their_zeros() -> None:
    levels = torch.tensor(
        [[1.0, -0.3, 0.0, 0.001], [0.0, 0.0, 0.0, 0.0], [-60000.0, 1.0, 2.0, 3.0], [torch.nan, 1.0, 0.0, 0.0]]
    )
    rows = quad2_rows(levels.repeat(64, 1).expand(3, -1, -1).half()).levels[0, :4]
    words = torch.stack([rows & 0xFFFFFFFF, rows >> 32 & 0xFFFFFFFF], -1)
    parts = torch.tensor([[_signed([int(word)]) for word in row] for row in words])
    exponents = ((parts[:, 1] & 3) << torch.arange(0, 8, 2)).sum(-1)
    values = (parts[:, 0] * 256 + (parts[:, 1] & ~3)) * torch.exp2(exponents.double() - 133)[:, None]
    assert values[0, 2] == 0 and not values[1].any() and exponents[3] == 255
    assert (values[:3] - levels[:3].half().double()).abs().amax(-1).le(levels[:3].abs().amax(-1) * 2.0**-12).all()


def test_a_damaged_table_is_refused() -> None:
    table = SplitTable(
        torch.full((256,), 255, dtype=torch.uint8), torch.zeros(256, dtype=torch.uint8), torch.zeros(256, 4).half()
    )
    with pytest.raises(ValueError, match="exponent byte 255"):
        split_rows((table, table, table))


@pytest.mark.parametrize("scale", [2.0**-122, 2.0**-113, 2.0**-20, 1.0, 2.0**100])
def test_two_bytes_keep_fourteen_bits_of_the_largest(scale: float) -> None:
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)) * scale
    x[0, :32], x[1, 5], x[2, 40] = 0.0, 4 * scale * (1 - 2.0**-24), -8 * scale
    largest = x.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    for two_bit in (False, True):
        error = (_unpacked(x, two_bit) - x.double()).unflatten(1, (-1, 32)).abs()
        assert (error <= largest.double() * 2.0**-14).all()


def test_a_group_with_an_infinity_is_nan_and_no_other() -> None:
    x = torch.ones(1, 96)
    x[0, 40], x[0, 70] = torch.inf, torch.nan
    values = _unpacked(x, False)
    assert torch.equal(values[0, :32], x[0, :32].double()) and values[0, 32:].isnan().all()


def _unpacked(x: Tensor, two_bit: bool) -> Tensor:
    """What the two bytes of each value stand for, in the order of FP4 or of 2-bit codes, float64."""
    vectors, columns = x.shape
    blocks, scales = allocate_packed(vectors, columns, CPU)
    pack_kernel[(-(-columns // 128), vectors)](x, blocks, scales, columns // 32, BLOCK_G=4, CHAINED=False)
    assert not blocks[:, -1].any() and not scales[:, -1].any()
    part = 8 if two_bit else 16
    high, low = blocks[:, :-1].unflatten(-1, (2, -1, 2, part))[:, :, int(two_bit)].unbind(-2)
    parts = (256 * high.double() + low.double()).flatten(-2) * scales[:, :-1, None].double()
    k = [_in_order(number, two_bit) for number in range(32)]
    return parts[..., k].flatten(1)


def _in_order(k: int, two_bit: bool) -> int:
    """Where value k of a group comes, parts one after the other."""
    return (
        _place_in_word(k % 16) // 4 * 8 + k // 16 * 4 + _place_in_word(k % 16) % 4
        if two_bit
        else k // 4 % 2 * 16 + k // 8 * 4 + k % 4
    )


def _check_decoders(words: list[int], levels: Tensor) -> None:
    """levels: int64 [3, 256], of `Rows`."""
    high, low = (int(levels[0, words[0] & 255]) >> shift & 0xFFFFFFFF for shift in (0, 32))
    two_bit = _signed(outputs_of(decode.TWO_BIT_PTX.value, {8: words[0], 12: high, 16: low}, 8))
    fp4 = _signed(outputs_of(decode.FP4_PTX.value, {4: words[0], 8: decode.MAGNITUDES.value}, 4))
    for k in range(8):
        positive, negative = fp4[k], fp4[8 + k]
        assert positive - negative == 2 * E2M1_VALUES[words[0] >> 4 * k & 15], k
    for k in range(16):
        at, code = _place_in_word(k), words[0] >> 2 * k & 3
        assert two_bit[at] == _signed([high])[code] and two_bit[16 + at] == _signed([low])[code], k


def _check_split(words: list[int], selectors: list[int]) -> None:
    """selectors: The row of each of the four partitions."""
    ordered = [E2M1_VALUES[code] for code in ORDERED_CODES]
    for partition, row in enumerate(selectors):
        first, second = row & 0xFFFFFFFF, row >> 32 & 0xFFFFFFFF
        cells = outputs_of(decode.CELLS_PTX.value, {3: first, 4: second}, 3)
        operands = {8: words[0], 12: words[1]} | dict(zip((16, 20, 24), cells, strict=True))
        values = _signed(outputs_of(decode.SPLIT_PTX.value, operands, 8))
        for k in range(16):
            base, residual = (word >> 2 * k & 3 for word in words[:2])
            if base != partition or residual != 3:
                at, number = _place_in_word(k), 4 * base - (base > partition) + residual
                assert values[at] - values[16 + at] == 2 * ordered[number], (partition, k)


def _signed(words: list[int]) -> list[int]:
    """The bytes of words, lowest first."""
    return [(word >> 8 * byte & 255 ^ 128) - 128 for word in words for byte in range(4)]


def _place_in_word(k: int) -> int:
    """Where code k of a word comes out: even codes of both halves, then odd ones."""
    return k % 2 * 8 + k // 2
