"""What the bits of a weight mean: pure pack and unpack pairs, exact for every code. Owns no file, no device, no offset on disk.

Every expert format is packed codes of b bits, one byte per 32 weights along K, and a table of 256 rows x 2^b values: the byte
chooses the row, the code the value. Matrices are [N, K] (rows out, columns in); any leading dimensions are batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP_SIZE = 32  # weights along K that share one byte
BLOCK_SIZE = 128  # rows and columns that share one FP8 scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E4M3_MAX = 448.0


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


PLANES = {"fp4": Plane("fp4", 4, True)}


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
    per_byte = 8 // bits
    shifts = torch.arange(per_byte, device=codes.device, dtype=torch.uint8) * bits
    return (codes.unflatten(-1, (-1, per_byte)) << shifts).sum(-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """[..., K*bits/8] uint8 -> [..., K] uint8, the inverse of `pack_codes`."""
    shifts = torch.arange(8 // bits, device=packed.device, dtype=torch.uint8) * bits
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def e8m0_to_float32(exponents: Tensor) -> Tensor:
    """2^(byte-127) of uint8 E8M0 bytes, exactly; byte 0 is the float32 subnormal 2^-127, byte 255 is NaN."""
    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, 0x00400000, bits)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


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
    values = torch.tensor(E2M1_VALUES, device=matrix.codes.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # [256, 2]: low nibble first
    weights = pairs[matrix.codes.int()].flatten(-2).unflatten(-1, (-1, GROUP_SIZE))
    return (weights * e8m0_to_float32(matrix.scales)[..., None]).flatten(-2).to(dtype)


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
