"""How half of an expert is cut among programs, warps and lanes of the stream kernel, and which layouts follow from that.

Everything but `numbers_along`, which kernels call, is computed when one is compiled. A linear layout says, for each bit of the number of a register, a lane or a
warp, which step along the tensor's axes it makes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from kernels.expert_gemv.slabs import FP4, SPLIT, TWO_BIT

LANES = 4  # of a warp, for each row
GROUP_WORDS = {FP4: 4, TWO_BIT: 2, SPLIT: 2}  # in each plane
LANE_GROUPS = {FP4: 1, TWO_BIT: 2, SPLIT: 1}  # that a lane takes in a step: 16 bytes, of both planes together
Steps = list[list[int]]
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """One kernel's work: a matrix (w2) or two (w1 and w3: up) of `height` rows and `groups` groups a row.

    slices: Warps that share a row's groups. rows: A program's, of each matrix. warps: Warps that share its rows.
    """

    up: bool
    height: int
    groups: int
    slices: int
    rows: int
    warps: int
    kind: int = FP4

    @property
    def lanes(self) -> int:
        """Of a warp, for each row."""
        return LANES

    @property
    def words(self) -> int:
        """Of a group in a plane."""
        return GROUP_WORDS[self.kind]

    @property
    def lane_groups(self) -> int:
        return LANE_GROUPS[self.kind]

    @property
    def lane_words(self) -> int:
        return self.lane_groups * self.words

    @property
    def step_groups(self) -> int:
        """Groups of a row in a step of all slices."""
        return self.slices * LANES * self.lane_groups

    @property
    def steps(self) -> int:
        return -(-self.groups // self.step_groups)

    @property
    def room(self) -> int:
        """Steps, rounded up to the power of two that layouts need."""
        return 1 << (self.steps - 1).bit_length()

    @property
    def even(self) -> bool:
        """Whether no step passes a row's end."""
        return self.groups % self.step_groups == 0

    @property
    def parts(self) -> int:
        """Of a group's activations: one for each output of a decoder."""
        return 8 // self.words

    @property
    def part_bytes(self) -> int:
        return 4 * self.words

    @property
    def unit(self) -> float:
        """What one of a sum of bytes * x is worth, scales aside: FP4's values are taken twice, levels' scales are of 2^-6."""
        return 4.0 if self.kind == TWO_BIT else 0.5

    @property
    def code_bytes(self) -> int:
        """Of a matrix in a plane."""
        return self.height * self.groups * 4 * self.words

    @property
    def mma(self) -> gl.NVMMADistributedLayout:
        """[slices, rows, 8 columns]."""
        return gl.NVMMADistributedLayout(
            version=[2, 0], warps_per_cta=[self.slices, self.warps, 1], instr_shape=[1, 16, 8]
        )

    @property
    def left(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(0, self.mma, 4)

    @property
    def right(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(1, self.mma, 4)

    @property
    def decoded(self) -> gl.DistributedLinearLayout:
        """[slices, rows, lanes, a group's words, 4 bytes]: a lane's rows are those of its fragments."""
        return self._decoded(self.words)

    @property
    def codes(self) -> gl.SliceLayout:
        """[slices, rows, lanes, words of a lane], as loaded."""
        return gl.SliceLayout(4, self._decoded(self.lane_words))

    @property
    def group_codes(self) -> gl.SliceLayout:
        """[slices, rows, lanes, a group's words]."""
        return gl.SliceLayout(4, self.decoded)

    @property
    def row_groups(self) -> gl.SliceLayout:
        """[slices, rows, lanes]: a value a group."""
        return gl.SliceLayout(3, self.group_codes)

    @property
    def lane_bytes(self) -> gl.SliceLayout:
        """[slices, rows, lanes, lane_groups]: a group's byte each."""
        return gl.SliceLayout(4, self._decoded(self.lane_groups))

    @property
    def column_groups(self) -> gl.SliceLayout:
        """[slices, lanes]: a value a group, the same in all rows."""
        return gl.SliceLayout(1, self.row_groups)

    @property
    def outputs(self) -> gl.SliceLayout:
        """[rows], the same for all kinds."""
        return gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, self._decoded(1)))))

    def _decoded(self, words: int) -> gl.DistributedLinearLayout:
        registers = _steps(5, 4, 4) + _steps(5, 3, words) + [[0, 8, 0, 0, 0]]
        registers += [[0, 16 * self.warps * bit, 0, 0, 0] for bit in _bits(self.rows // (16 * self.warps))]
        lanes = _steps(5, 2, LANES) + _steps(5, 1, 8)
        warps = [[0, 16 * bit, 0, 0, 0] for bit in _bits(self.warps)] + _steps(5, 0, self.slices)
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [self.slices, self.rows, LANES, words, 4])

    @property
    def columns(self) -> gl.DistributedLinearLayout:
        """[slices, 4 column pairs, 2 bytes of a value, lanes, a part's bytes]: x as fragments take it, the same in all pairs."""
        lanes = [*_steps(5, 3, LANES), *_steps(5, 2, 2), *_steps(5, 1, LANES)]
        warps = [[0] * 5 for _ in _bits(self.warps)] + _steps(5, 0, self.slices)
        shape = [self.slices, LANES, 2, LANES, self.part_bytes]
        return gl.DistributedLinearLayout(_steps(5, 4, self.part_bytes), lanes, warps, [], shape)

    @property
    def x_board(self) -> gl.DistributedLinearLayout:
        """[room * lane_groups * parts, slices * lanes * 2 * part_bytes] bytes, 16 a thread at once."""
        return self._board(self.room * self.lane_groups * self.parts, self.slices * LANES * 2 * self.part_bytes, 16)

    @property
    def scale_board(self) -> gl.DistributedLinearLayout:
        """[room * lane_groups, slices * lanes]."""
        return self._board(self.room * self.lane_groups, self.slices * LANES, 1)

    @property
    def byte_board(self) -> gl.DistributedLinearLayout:
        """[room, rows, step_groups] bytes, 16 a thread at once along a row."""
        steps = _steps(3, 2, self.step_groups) + _steps(3, 0, self.room) + _steps(3, 1, self.rows)
        return self._spread(steps, 16, [self.room, self.rows, self.step_groups])

    def _board(self, rows: int, columns: int, run: int) -> gl.DistributedLinearLayout:
        return self._spread(_steps(2, 1, columns) + _steps(2, 0, rows), run, [rows, columns])

    def _spread(self, steps: Steps, run: int, shape: list[int]) -> gl.DistributedLinearLayout:
        """Runs of so many elements dealt to all threads in turn."""
        first, rest = steps[: len(_bits(run))], steps[len(_bits(run)) :]
        count = 5 + len(_bits(self.slices * self.warps))
        threads = rest[:count] + [[0] * len(shape)] * (count - len(rest[:count]))
        return gl.DistributedLinearLayout(first + rest[count:], threads[:5], threads[5:], [], shape)


@constexpr_function
def _line(layout: gl.DistributedLinearLayout, axis: int, rank: int) -> gl.DistributedLinearLayout:
    """The layout of numbers along one axis, which becomes `layout` when the others are added in their order."""
    for number in reversed(range(rank)):
        if number != axis:
            layout = gl.SliceLayout(number, layout)
    return layout


@gluon.jit
def numbers_along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr, RANK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers along one axis of a layout, of size 1 along the others."""
    numbers = gl.arange(0, size, layout=_line(layout, axis, RANK))
    for number in gl.static_range(RANK):
        if number != axis:
            numbers = numbers.expand_dims(number)
    return numbers


@dataclass(frozen=True)
class Constants:
    """A Plan whose every property is a constant to the compiler, which takes no plain numbers and layouts.

    source: A hash of this file. The compiler finds a kernel it has compiled before by the text of these constants, and that has
        no layouts in it.
    """

    plan: Plan
    source: str = SOURCE

    def __getattr__(self, name: str) -> gl.constexpr:
        return gl.constexpr(getattr(self.plan, name))


def _bits(size: int) -> list[int]:
    return [1 << bit for bit in range(size.bit_length() - 1)]


def _steps(rank: int, axis: int, size: int) -> Steps:
    """One step along an axis for each bit of its size."""
    return [[bit if number == axis else 0 for number in range(rank)] for bit in _bits(size)]
