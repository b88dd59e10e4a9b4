"""What the bits of a weight mean: pure pack and unpack pairs, exact for every code. Owns no file, no device, no offset on disk.

Every expert format is packed codes of b bits, one byte per 32 weights along K, and a table of 256 rows x 2^b values: the byte
chooses the row, the code the value. Matrices are [N, K] (rows out, columns in); any leading dimensions are batch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZE = 32  # weights along K that share one byte
BLOCK_SIZE = 128  # rows and columns that share one FP8 scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E4M3_MAX = 448.0
INT2_LEVELS = (-1.5, -0.5, 0.5, 1.5)


class Plane(NamedTuple):
    """One of the parts a precision is made of: codes of `code_bits`, and a byte per group if `has_scales`."""

    name: str
    code_bits: int
    has_scales: bool

    def matrix_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of the codes and of the group bytes of one [rows, columns] matrix."""
        scales = rows * columns // GROUP_SIZE if self.has_scales else 0
        return rows * columns * self.code_bits // 8, scales

    def slab_bytes(self, hidden: int, width: int) -> int:
        """Bytes of one expert (w1, w3 [width, hidden] and w2 [hidden, width])."""
        return 3 * sum(self.matrix_bytes(width, hidden))


PLANES = {
    "fp4": Plane("fp4", 4, True),
    "int2": Plane("int2", 2, True),
    "quad2": Plane("quad2", 2, True),
    "base": Plane("base", 2, True),
    "residual": Plane("residual", 2, False),
}


class TableTensor(NamedTuple):
    """A tensor of tables.safetensors; in `shape` "L" is the layers, "E" the experts, and 3 the matrices w1, w3, w2."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def sizes(self, layers: int, experts: int) -> tuple[int, ...]:
        """The shape in numbers."""
        letters = {"L": layers, "E": experts}
        return tuple(letters[size] if isinstance(size, str) else size for size in self.shape)


class Code(NamedTuple):
    """How a directory spells its 2-bit precision: the planes it adds (the first alone is that precision) and its tables."""

    planes: tuple[str, ...]
    tables: tuple[TableTensor, ...]


CODES = {
    "int2": Code(("int2",), (TableTensor("int2.normalisers", torch.float32, ("L", "E", 3)),)),
    "quad2": Code(
        ("quad2",),
        (
            TableTensor("quad2.levels", torch.float16, ("L", 3, 256, 4)),
            TableTensor("quad2.normalisers", torch.float32, ("L", "E", 3)),
        ),
    ),
    "split": Code(
        ("base", "residual"),
        (
            TableTensor("split.exponents", torch.uint8, ("L", 3, 256)),
            TableTensor("split.partitions", torch.uint8, ("L", 3, 256)),
            TableTensor("split.levels", torch.float16, ("L", 3, 256, 4)),
        ),
    ),
}


class Matrix(NamedTuple):
    """One packed matrix: codes [..., N, K*b/8] uint8 and group bytes [..., N, K/32] uint8 (None in a plane without)."""

    codes: Tensor
    scales: Tensor | None


def split_slab(slab: Tensor, plane: Plane, hidden: int, width: int) -> tuple[Matrix, Matrix, Matrix]:
    """Views of w1, w3 and w2 in slabs of byte order 1: w1 codes, w1 scales, w3 codes, w3 scales, w2 codes, w2 scales.

    Args:
        slab: [..., at least plane.slab_bytes(hidden, width)] uint8; what lies behind is padding.
        plane: What the slab holds.
        hidden: D, columns of w1 and w3.
        width: F, columns of w2.
    """
    offset, matrices = 0, []
    for rows, columns in ((width, hidden), (width, hidden), (hidden, width)):
        code_bytes, scale_bytes = plane.matrix_bytes(rows, columns)
        codes = slab[..., offset : offset + code_bytes].unflatten(-1, (rows, -1))
        offset += code_bytes
        scales = slab[..., offset : offset + scale_bytes].unflatten(-1, (rows, -1)) if plane.has_scales else None
        offset += scale_bytes
        matrices.append(Matrix(codes, scales))
    return matrices[0], matrices[1], matrices[2]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """[..., K] uint8 codes below 2^bits -> [..., K*bits/8] uint8; the first code lies in the lowest bits."""
    first, *others = codes.unflatten(-1, (-1, 8 // bits)).unbind(-1)
    packed = first
    for place, other in enumerate(others, 1):
        packed = packed | other << place * bits
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """[..., K*bits/8] uint8 -> [..., K] uint8, the inverse of `pack_codes`."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def e8m0_to_float32(exponents: Tensor) -> Tensor:
    """2^(byte-127) of uint8 E8M0 bytes, exactly; byte 0 is the float32 subnormal 2^-127, byte 255 is NaN."""
    return _e8m0_values(exponents.device).index_select(0, exponents.flatten().int()).view(exponents.shape)


@cache
def _e8m0_values(device: torch.device) -> Tensor:
    """The value of every byte, [256] float32."""
    bits = torch.arange(256, dtype=torch.int32, device=device) << 23
    bits[0], bits[255] = 0x00400000, 0x7FC00000
    return bits.view(torch.float32)


def _exponent_of(x: Tensor) -> Tensor:
    """floor(log2(x)) of positive normal float32, exactly, as int32; zero gives -127."""
    return (x.float().view(torch.int32) >> 23) - 127


def quantize_fp4(weight: Tensor) -> Matrix:
    """The MXFP4 rounding of `weight` [..., N, K], codes packed (low nibble = even k), E8M0 byte per 32.

    The shared exponent is floor(log2(amax)) - 2, values round to nearest even and saturate at 6 (OCP Microscaling 1.0, 6.3).
    """
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    exponents = (_exponent_of(groups.abs().amax(-1)) - 2 + 127).clamp(0, 254).to(torch.uint8)
    scaled = groups / e8m0_to_float32(exponents)[..., None]
    return Matrix(pack_codes(_round_e2m1(scaled).flatten(-2), 4), exponents)


def _round_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes of the values nearest to x, ties to the even code, saturating; zero has no sign."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # (midpoint, whether the midpoint itself belongs to the upper code: it does when that one is even)
    for midpoint, upper_is_even in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += (magnitude >= midpoint) if upper_is_even else (magnitude > midpoint)
    return torch.where((x < 0) & (code > 0), code + 8, code)


def dequantize_fp4(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact values [..., N, K] of an MXFP4 matrix: E2M1(code) * 2^(byte-127)."""
    assert matrix.scales is not None
    pairs = _constant_pairs(E2M1_VALUES, matrix.codes.device)
    return _scaled(_look_up_pairs(pairs, matrix.codes), e8m0_to_float32(matrix.scales)).to(dtype)


def dequantize_int2(matrix: Matrix, normalisers: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., N, K] of INT2 matrices: E4M3(byte) * (-1.5, -0.5, 0.5, 1.5)[code] * normaliser.

    Args:
        matrix: Codes [..., N, K/4], E4M3 bytes [..., N, K/32].
        normalisers: [...] float32, one a matrix.
        dtype: Of the result; the products are float32.
    """
    assert matrix.scales is not None
    pairs = _constant_pairs(INT2_LEVELS, matrix.codes.device)
    scales = matrix.scales.view(torch.float8_e4m3fn).float() * normalisers[..., None, None]
    return _scaled(_look_up_pairs(pairs, unpack_codes(matrix.codes, 4)), scales).to(dtype)


def dequantize_quad2(matrix: Matrix, levels: Tensor, normalisers: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [..., N, K] of QUAD2 matrices of one layer and projection: levels[byte, code] * normaliser.

    Args:
        matrix: Codes [..., N, K/4], rows of the table [..., N, K/32].
        levels: [256, 4] float16.
        normalisers: [...] float32, one a matrix.
        dtype: Of the result; the products are float32.
    """
    return look_up_rows(levels.float(), matrix).mul_(normalisers[..., None, None]).to(dtype)


def look_up_rows(rows: Tensor, matrix: Matrix) -> Tensor:
    """rows[byte, code] of every weight: [256, 4] float32, codes [..., N, K/4], bytes [..., N, K/32] -> [..., N, K]."""
    assert matrix.scales is not None
    nibbles = unpack_codes(matrix.codes, 4).unflatten(-1, (-1, GROUP_SIZE // 2))
    return _look_up_pairs(_pairs_of(rows), (matrix.scales.int() << 4)[..., None] | nibbles).flatten(-2)


def _pairs_of(values: Tensor) -> Tensor:
    """Every two codes' values as one 64-bit number: [R, n] or [n] float32 -> [R*n*n] int64 at row*n*n + second*n + first."""
    count = values.shape[-1]
    firsts = values.repeat([1] * (values.ndim - 1) + [count])
    seconds = values.repeat_interleave(count, -1)
    return torch.stack([firsts.flatten(), seconds.flatten()], -1).view(torch.int64).flatten()


@cache
def _constant_pairs(values: tuple[float, ...], device: torch.device) -> Tensor:
    return _pairs_of(torch.tensor(values, device=device))


def _look_up_pairs(table: Tensor, pairs: Tensor) -> Tensor:
    """The values of two codes at a time: table as `_pairs_of` gives it, pairs [..., P] its indices -> float32 [..., 2P].

    A gather of 64-bit elements is several times faster on a CPU than one of rows of two floats.
    """
    return table.index_select(0, pairs.int().flatten()).view(torch.float32).view(*pairs.shape[:-1], -1)


def _scaled(weights: Tensor, scales: Tensor) -> Tensor:
    """`weights` [..., N, K], each group multiplied by its scale [..., N, K/32], in place."""
    weights.unflatten(-1, (-1, GROUP_SIZE)).mul_(scales[..., None])
    return weights


def quantize_fp8_block(weight: Tensor) -> Matrix:
    """The FP8-block rounding of `weight` [N, K] (multiples of 128): codes float8_e4m3fn [N, K], E8M0 bytes [N/128, K/128].

    The scale is the smallest power of two that keeps the block within E4M3's 448.
    """
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK_SIZE, BLOCK_SIZE, columns // BLOCK_SIZE, BLOCK_SIZE)
    amax = blocks.abs().amax((1, 3)) / E4M3_MAX
    bits = amax.view(torch.int32)
    exponents = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254).to(torch.uint8)
    scaled = blocks / e8m0_to_float32(exponents)[:, None, :, None]
    return Matrix(scaled.to(torch.float8_e4m3fn).view(rows, columns), exponents)


def dequantize_fp8_block(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact values [N, K] of an FP8-block matrix: E4M3(code) * 2^(byte-127) of its 128 x 128 block."""
    assert matrix.scales is not None
    scales = e8m0_to_float32(matrix.scales)
    rows, columns = matrix.codes.shape
    blocks = matrix.codes.float().view(rows // BLOCK_SIZE, BLOCK_SIZE, columns // BLOCK_SIZE, BLOCK_SIZE)
    return (blocks * scales[:, None, :, None]).view(rows, columns).to(dtype)
