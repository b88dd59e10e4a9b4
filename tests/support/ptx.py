"""A few PTX instructions in Python, enough to run the decoders' assembly on a machine without a GPU, for one lane."""

from __future__ import annotations

import re

import numpy as np

WORD = 2**32 - 1


def sum_of_products(assembly: str, operands: dict[int, int]) -> float:
    """What the two halves of `acc` add up to after `assembly`, in float64; operands: $number -> word."""
    registers = {f"${number}": word & WORD for number, word in operands.items()}
    halves = np.zeros(2)
    for line in assembly.split("\n"):
        if not line.endswith(";") or line.startswith((".", "cvt", "add.f32", "mov.b32 {")):
            continue
        operation, rest = line[:-1].split(" ", 1)
        if operation == "mov.b64":
            low, high, wide = re.findall(r"\w+", rest)
            registers[low], registers[high] = registers[wide] & WORD, registers[wide] >> 32
            continue
        target, *names = (name.strip() for name in rest.split(","))
        words = [registers[name] if name in registers else int(name, 0) for name in names if name != "acc"]
        if operation in ("mul.rn.f16x2", "fma.rn.f16x2"):
            halves = halves * (operation == "fma.rn.f16x2") + _halves(words[0]) * _halves(words[1])
        else:
            registers[target] = OPERATIONS[operation](*words)
    return float(halves.sum())


def _halves(word: int) -> np.ndarray:
    return np.array([word], np.uint32).view(np.float16).astype(np.float64)


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return sum(((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1)) & 1) << i for i in range(32))


def _prmt(a: int, b: int, selector: int) -> int:
    places = [selector >> 4 * i & 15 for i in range(4)]
    assert max(places) < 8, "a selector that repeats signs"
    return sum(((a | b << 32) >> 8 * place & 255) << 8 * i for i, place in enumerate(places))


OPERATIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n & WORD,
    "shr.b32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "mul.lo.u32": lambda a, b: a * b & WORD,
    "mul.wide.u32": lambda a, b: a * b,
}
