"""The predictor: which experts later layers will pick, from the hidden state at this one; and its file, written and read.

Owns the network and the file. The other kinds that a file can name are in `predictor.baselines`; neither trains anything.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from predictor.baselines import LinearProbe, NextRouter, RouterWeights, chance_logit, normalised
from predictor.errors import PredictorError
from predictor.files import replace_file
from predictor.trace_files import TraceShape

LOOKAHEADS = (2, 3)
LAYER_WIDTH = 128  # of a layer's embedding
WIDTH = 1536
MAX_WIDTH = 1 << 14
VERSION = 1
CONFIG = "predictor"  # the one entry of the metadata, as JSON: the order of several is not fixed
REMEDY = "run: prep train-predictor MODEL"


class Predictor(Protocol):
    """What the run time asks. Scores rank the experts of one layer; those of a trained kind are logits."""

    kind: str
    shape: TraceShape
    lookaheads: tuple[int, ...]
    width: int

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        """float32 [T, number of lookaheads, E] from layer `layer_idx`'s router input [T, D]; no synchronisation.

        Those of a lookahead that ends behind the last layer mean nothing.
        """
        ...


class RouterPredictor(nn.Module):
    """The normalised hidden state and a learned embedding of the layer, two hidden layers, one head a lookahead."""

    kind = "mlp"

    def __init__(
        self,
        shape: TraceShape,
        lookaheads: tuple[int, ...] = LOOKAHEADS,
        width: int = WIDTH,
        random: torch.Generator | None = None,
    ) -> None:
        """Fresh weights, drawn from `random`; the logits begin at K of E."""
        super().__init__()
        self.shape, self.lookaheads, self.width = shape, lookaheads, width
        self.layers = nn.Parameter(torch.empty(shape.num_layers, LAYER_WIDTH).normal_(generator=random))
        self.enter = _linear(shape.hidden_size + LAYER_WIDTH, width, random)
        self.middle = _linear(width, width, random)
        self.heads = _linear(width, len(lookaheads) * shape.num_experts, random)
        nn.init.constant_(self.heads.bias, chance_logit(shape))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [n, L, number of lookaheads, E] of hidden states [n, L, D]."""
        return self._logits(hidden, self.layers)

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        """Logits float32 [T, number of lookaheads, E] of one layer's hidden states [T, D]."""
        return self._logits(x, self.layers[layer_idx]).float()

    def _logits(self, x: Tensor, layers: Tensor) -> Tensor:
        """The product with the concatenation of both, without writing it down: each part has its own columns of `enter`."""
        split = self.shape.hidden_size
        of_layer = F.linear(layers, self.enter.weight[:, split:], self.enter.bias)
        x = F.linear(normalised(x, self.enter.weight.dtype), self.enter.weight[:, :split]) + of_layer
        x = F.silu(self.middle(F.silu(x)))
        return self.heads(x).unflatten(-1, (len(self.lookaheads), self.shape.num_experts))


def _linear(inputs: int, outputs: int, random: torch.Generator | None) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu", generator=random)
    nn.init.zeros_(linear.bias)
    return linear


def save(path: Path, predictor: Predictor, fingerprint: str) -> None:
    """Writes the predictor of the model with this fingerprint to `path`, whole or not at all; the next router has no tensors.

    Raises:
        PredictorError: The system refused to write.
    """
    tensors = _tensors(predictor)
    config = _model_fields(predictor.shape, fingerprint) | {
        "kind": predictor.kind,
        "lookaheads": predictor.lookaheads,
        "width": predictor.width,
        "crc32": _checksum(tensors),
    }
    try:
        replace_file(path, [to_bytes(tensors, {CONFIG: json.dumps(config)})])
    except OSError as cause:
        raise PredictorError(
            f"{path}: writing failed ({cause.strerror or cause}), expected room and permission; mend that and train again"
        ) from cause


def load(
    path: Path,
    *,
    shape: TraceShape,
    fingerprint: str,
    routers: Sequence[RouterWeights | None],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Predictor:
    """The predictor in `path`, its weights on `device` in `dtype`, frozen.

    Args:
        routers: The model's own by layer, None where a layer picks by token id; they are the weights of kind "next-router".

    Raises:
        PredictorError: The file is missing, damaged, or of a model with another shape or fingerprint (names the field).
    """
    config, tensors = _read(path)
    for field, expected in _model_fields(shape, fingerprint).items():
        if config.get(field) != expected:
            raise PredictorError(
                f"{path}: {field} is {config.get(field, 'missing')}, expected {expected}; it is of another model or version, {REMEDY}"
            )
    if config.get("crc32") != _checksum(tensors):
        raise PredictorError(
            f"{path}: its tensors' checksum is {_checksum(tensors)}, expected {config.get('crc32')}; {REMEDY}"
        )
    predictor = _build(path, config, shape, routers)
    if isinstance(predictor, nn.Module):
        _fill(path, predictor, tensors)
        predictor.to(device, dtype).eval().requires_grad_(False)
    return predictor


def _model_fields(shape: TraceShape, fingerprint: str) -> dict[str, Any]:
    return {"version": VERSION, **asdict(shape), "fingerprint": fingerprint}


def _tensors(predictor: Predictor) -> dict[str, Tensor]:
    if not isinstance(predictor, nn.Module):
        return {}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in predictor.state_dict().items()}


def _checksum(tensors: dict[str, Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, total)
    return total


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            config = json.loads((file.metadata() or {})[CONFIG])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError) as cause:
        raise PredictorError(f"{path}: cannot be read ({cause}), expected a trained predictor; {REMEDY}") from cause
    if not isinstance(config, dict):
        raise PredictorError(f"{path}: {CONFIG} is no JSON object, expected the config of a predictor; {REMEDY}")
    return config, tensors


def _build(
    path: Path, config: dict[str, Any], shape: TraceShape, routers: Sequence[RouterWeights | None]
) -> RouterPredictor | LinearProbe | NextRouter:
    kind, ahead, width = (config.get(field, "missing") for field in ("kind", "lookaheads", "width"))
    if not (isinstance(ahead, list) and ahead and all(map(_is_small, [*ahead, width]))):
        raise PredictorError(f"{path}: lookaheads {ahead} and width {width}, expected small numbers; {REMEDY}")
    lookaheads = tuple(ahead)
    if kind == RouterPredictor.kind:
        return RouterPredictor(shape, lookaheads, width)
    if kind == LinearProbe.kind:
        return LinearProbe(shape, lookaheads)
    if kind == NextRouter.kind:
        return NextRouter(shape, lookaheads, routers)
    raise PredictorError(f"{path}: kind is {kind}, expected mlp, linear or next-router; {REMEDY}")


def _is_small(value: Any) -> bool:
    """Whether it is a size that can be built before it is compared with the tensors."""
    return type(value) is int and 0 <= value <= MAX_WIDTH


def _fill(path: Path, predictor: nn.Module, tensors: dict[str, Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in predictor.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise PredictorError(
                f"{path}: tensor {name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'none')}; {REMEDY}"
            )
    predictor.load_state_dict(tensors)
