"""The clamped SwiGLU on a card, for every kernel that ends with one. Its definition is in `kernels.expert`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon


@triton.jit
def clamped_swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, ±limit); NaN where either is: the card's plain minimum would drop it."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    gate = tl.minimum(gate, limit, propagate_nan=ALL)
    up = tl.minimum(tl.maximum(up, -limit, propagate_nan=ALL), limit, propagate_nan=ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


clamped_swiglu_in_gluon = gluon.jit(clamped_swiglu.fn)
