"""A few PTX instructions in Python, enough to run the decoders' assembly on a machine without a GPU, for one lane."""

from __future__ import annotations

import re

import numpy as np

WORD = 2**32 - 1


def outputs_of(assembly: str, operands: dict[int, int], words: int) -> list[int]:
    """What `assembly` leaves in $0…$(words - 1); operands: $number -> word."""
    registers = _execute(assembly, operands)
    return [registers[f"${word}"] for word in range(words)]


def bfloat16_outputs(assembly: str, operands: dict[int, int], words: int) -> list[float]:
    """The bfloat16 values that `assembly` leaves in $0…$(words - 1), low halves first; operands: $number -> word."""
    outputs = outputs_of(assembly, operands, words)
    return [float(half) for word in outputs for half in _bfloat16_halves(word)]


def _execute(assembly: str, operands: dict[int, int]) -> dict[str, int]:
    """The registers at the end."""
    registers = {f"${number}": word & WORD for number, word in operands.items()}
    for line in assembly.split("\n"):
        if not line.endswith(";") or line.startswith("."):
            continue
        operation, rest = line[:-1].split(" ", 1)
        if operation == "mov.b64":
            low, high, wide = re.findall(r"\w+", rest)
            registers[low], registers[high] = registers[wide] & WORD, registers[wide] >> 32
            continue
        target, *names = (name.strip() for name in rest.split(","))
        words = [registers[name] if name in registers else int(name, 0) for name in names]
        registers[target] = OPERATIONS[operation](*words)
    return registers


def _bfloat16_halves(word: int) -> np.ndarray:
    return np.array([word << 16 & WORD, word & 0xFFFF0000], np.uint32).view(np.float32).astype(np.float64)


def _fma_bfloat16(a: int, b: int, c: int) -> int:
    """Rounded to nearest even: a bfloat16 is the upper half of a float32, which holds every product that is added to zero."""
    wide = (_bfloat16_halves(a) * _bfloat16_halves(b) + _bfloat16_halves(c)).astype(np.float32).view(np.uint32)
    low, high = (int(bits) + 0x7FFF + (int(bits) >> 16 & 1) >> 16 for bits in wide)
    return high << 16 | low


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return sum(((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1)) & 1) << i for i in range(32))


def _prmt(a: int, b: int, selector: int) -> int:
    """A selector's top bit repeats the sign of the byte that the others name."""
    chosen = [(a | b << 32) >> 8 * (selector >> 4 * i & 7) & 255 for i in range(4)]
    repeats = [selector >> 4 * i + 3 & 1 for i in range(4)]
    return sum(
        (byte if not repeat else 255 * (byte >> 7)) << 8 * i
        for i, (byte, repeat) in enumerate(zip(chosen, repeats, strict=True))
    )


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n & WORD,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, n: a >> n,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "not.b32": lambda a: ~a & WORD,
    "add.u32": lambda a, b: a + b & WORD,
    "sub.u32": lambda a, b: a - b & WORD,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "fma.rn.bf16x2": _fma_bfloat16,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "mul.wide.u32": lambda a, b: a * b,
}
