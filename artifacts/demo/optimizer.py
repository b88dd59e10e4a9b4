"""How the demo's weights move: Muon for the matrices, AdamW for the rest, and the routers' balancing bias.

Muon replaces a matrix's averaged gradient by the nearest (semi-)orthogonal matrix, found by a fixed number of
Newton-Schulz steps, scaled so that its root mean square is 0.2 of the learning rate, as an AdamW update's would be.
"""

from typing import Any

import torch
from torch import Tensor

from artifacts.demo.forward import Model, Weights

MOMENTUM, WEIGHT_DECAY = 0.95, 0.1
QUINTIC = (3.4445, -4.7750, 2.0315)  # pushes singular values into about 0.7 to 1.2
AS_VECTORS = ("embed.weight", "head.weight", "gate.weight", "hc_attn_fn", "hc_ffn_fn", "hc_head_fn", ".ape")


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """The nearly orthogonal factors of matrices [..., N, K], by Newton-Schulz, in bfloat16 where that is fast."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-12)).to(torch.bfloat16 if x.is_cuda else torch.float32)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimizer:
    """Steps every weight that wants a gradient. Owns the moments; clears the gradients after a step."""

    def __init__(self, weights: Weights, rate: float, matrix_rate: float) -> None:
        """A `matrix_rate` of 0 leaves the matrices to AdamW too."""
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        is_matrix = {n: matrix_rate > 0 and w.ndim > 1 and not n.endswith(AS_VECTORS) for n, w in trained.items()}
        self.matrices = {name: weight for name, weight in trained.items() if is_matrix[name]}
        self.momenta = {name: torch.zeros_like(weight) for name, weight in self.matrices.items()}
        self.matrix_rate, self.rate = matrix_rate, rate
        rest = [weight for name, weight in trained.items() if not is_matrix[name]]
        self.adam = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.clip = list(trained.values())

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update at `factor` times the peak rates."""
        torch.nn.utils.clip_grad_norm_(self.clip, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * factor
        self.adam.step()
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, weight in self.matrices.items():
            by_shape.setdefault(tuple(weight.shape), []).append(name)
        for names in by_shape.values():
            self._step_alike(names, self.matrix_rate * factor)
        for weight in self.clip:
            weight.grad = None

    def _step_alike(self, names: list[str], rate: float) -> None:
        """Muon on matrices of one shape, stacked."""
        for name in names:
            self.momenta[name].lerp_(self.matrices[name].grad, 1 - MOMENTUM)
        looking_ahead = [self.matrices[n].grad.lerp(self.momenta[n], MOMENTUM) for n in names]
        updates = orthogonal(torch.stack(looking_ahead))
        scale = 0.2 * max(updates.shape[-2:]) ** 0.5
        for name, update in zip(names, updates, strict=True):
            self.matrices[name].mul_(1 - rate * WEIGHT_DECAY).add_(update, alpha=-rate * scale)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"adam": self.adam.state_dict(), "momenta": self.momenta}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.adam.load_state_dict(state["adam"])
        for name, momentum in self.momenta.items():
            momentum.copy_(state["momenta"][name])


@torch.no_grad()
def balance_routers(model: Model, step: float) -> None:
    """Raise the balancing bias of underloaded experts and lower that of overloaded ones by `step`."""
    for layer, load in zip(model.layers, model.loads, strict=True):
        if "ffn.gate.bias" in layer:
            layer["ffn.gate.bias"].add_(torch.sign(load.float().mean() - load.float()), alpha=step)
