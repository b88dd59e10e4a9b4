"""Where a model meets whatever holds its routed experts: two protocols, no code. A model knows neither tiers nor files."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ExpertProvider(Protocol):
    """Gives a layer's routed experts, wherever they lie."""

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Each pick's weighted output, float32 [T, K, D], newly allocated; a dropped pick is zeros.

        A pick's output does not depend on the other picks of the call; the caller adds them in column order.

        Args:
            layer_idx: Which layer asks.
            x: [T, D] normalised activations in the model's dtype, not modified.
            topk_ids: [T, K] int64 expert ids, best router weight first.
            topk_weights: [T, K] float32 router weights, normalised and scaled.

        Raises:
            StrawError: An expert could not be read.
        """
        ...


class RouterObserver(Protocol):
    """Sees what every router saw and chose; must not modify it, and copies what it keeps."""

    def __call__(self, layer_idx: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        """Called once per layer and forward, with the arguments that the provider gets."""
        ...
