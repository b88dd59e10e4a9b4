"""Which activations are rounded as the official code simulates it (facts 3.9, rules A, B, C). A choice, off by default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActivationRounding:
    """Off: weights alone are quantised. On: parity with the official logits, at the price of chaos beyond a few tokens."""

    linear: bool = False  # A: inputs of every FP8 and FP4 matrix, E4M3 per 128
    kv: bool = False  # B: window and main compressed entries without their RoPE tail, E4M3 per 64
    indexer: bool = False  # C: indexer queries and entries after a Hadamard transform, E2M1 per 32
