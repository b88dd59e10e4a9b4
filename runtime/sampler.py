"""Logits in, one token id out: greedy, or temperature and top-p from a seed; and the defaults a model directory asks for.

Owns the choice of a token only; stopping, penalties and the detection of junk are not here.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import ArtifactError

DEFAULTS_FILE = "generation_config.json"
TEMPERATURE_RULE = "a finite number of at least 0"
TOP_P_RULE = "a number above 0 and at most 1"
SEED_RULE = "an integer from 0 to 2**63 - 1"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Temperature and top-p that the commands use when the user gives none; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0

    @classmethod
    def from_directory(cls, directory: Path) -> SamplingDefaults:
        """What `generation_config.json` in `directory` asks for; an absent file, key or null leaves 1.0.

        `do_sample` false means greedy, whatever the temperature.

        Raises:
            ArtifactError: The file cannot be read, is not a JSON object, or a value is not possible.
        """
        path = directory / DEFAULTS_FILE
        raw = _read_object(path)
        temperature, top_p, do_sample = (_default(raw, key) for key in ("temperature", "top_p", "do_sample"))
        checks = [
            ("temperature", temperature, _is_temperature(temperature), TEMPERATURE_RULE),
            ("top_p", top_p, _is_top_p(top_p), TOP_P_RULE),
            ("do_sample", do_sample, isinstance(do_sample, bool), "true or false"),
        ]
        for key, value, valid, rule in checks:
            if not valid:
                raise ArtifactError(f"{path}: {key} is {value!r}, expected {rule}; correct it or fetch the file again")
        return cls(float(temperature) if do_sample else 0.0, float(top_p))


class Sampler:
    """Chooses tokens one after another; the same seed and the same logits give the same tokens, on every device.

    A draw takes one number from the sampler's own CPU generator, a greedy choice none. Not shared between streams.
    """

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        """A sampler at the start of its seed's sequence.

        Args:
            temperature: What the logits are divided by; 0 takes the largest one.
            top_p: The draw is among the fewest tokens, the most probable first, whose probabilities reach this sum.
            seed: From 0 to 2**63 - 1.

        Raises:
            ValueError: A value outside its range.
        """
        _require("temperature", temperature, _is_temperature(temperature), TEMPERATURE_RULE)
        _require("top_p", top_p, _is_top_p(top_p), TOP_P_RULE)
        _require("seed", seed, isinstance(seed, int) and 0 <= seed < 2**63, SEED_RULE)
        self.temperature, self.top_p, self.seed = temperature, top_p, seed
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """The chosen token id; among equal logits the smaller id counts as the more probable.

        Args:
            logits: [V] float32, any device, not modified; -inf excludes a token.

        Raises:
            ValueError: Another shape or dtype, NaN or +inf among the logits, or every one of them -inf.
        """
        scores = _checked(logits)
        if self.temperature == 0:
            return int(scores.argmax())  # documented to be the first among equals
        # On the CPU, so that the draw does not depend on the device; float64, so that small probabilities add up.
        probabilities = _softmax(scores.cpu().double(), self.temperature)
        if self.top_p == 1:
            return self._draw(probabilities)
        ids = _top_p_ids(probabilities, self.top_p)
        return int(ids[self._draw(probabilities[ids])])

    def _draw(self, weights: Tensor) -> int:
        """An index with probability proportional to its weight: the inverse of the cumulative sum at a uniform number."""
        cumulative = weights.cumsum(0)
        # rand is at most 1 - 2**-53, so the product stays below the total, and the index inside the tensor. Counting from
        # the right of equal sums steps over weights of zero.
        point = torch.rand(1, generator=self._generator, dtype=torch.float64) * cumulative[-1]
        return int(torch.searchsorted(cumulative, point, right=True))


def _softmax(scores: Tensor, temperature: float) -> Tensor:
    """softmax(scores / temperature), the maximum taken off first so that a tiny temperature does not overflow."""
    return ((scores - scores.max()) / temperature).softmax(0)


def _top_p_ids(probabilities: Tensor, top_p: float) -> Tensor:
    """Ids of the smallest set whose probability reaches top_p, most probable first; int64, at least one.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, section 3.1 (arXiv 1904.09751).
    """
    # All tokens below this floor together weigh less than 1 - top_p, so the others reach top_p without them. Few of a
    # real model's 129,280 tokens are above it, and only those are sorted.
    candidates = (probabilities >= (1 - top_p) / len(probabilities)).nonzero().flatten()
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    num_below = int((ordered.cumsum(0) < top_p).sum())
    return candidates[order[: num_below + 1]]


def _checked(logits: Tensor) -> Tensor:
    if logits.ndim != 1 or logits.numel() == 0 or logits.dtype != torch.float32:
        raise ValueError(f"logits are {list(logits.shape)} {logits.dtype}, expected [V] torch.float32 with V > 0")
    largest = float(logits.max())  # NaN if any is NaN
    if not math.isfinite(largest):
        raise ValueError(f"the largest of {logits.numel()} logits is {largest}, expected a finite number and no NaN")
    return logits


def _require(name: str, value: Any, valid: bool, rule: str) -> None:
    if not valid:
        raise ValueError(f"{name} is {value!r}, expected {rule}")


def _is_number(value: Any) -> bool:
    # A JSON integer may exceed every float; comparing is safe where converting is not.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_temperature(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_top_p(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _default(raw: dict[str, Any], key: str) -> Any:
    value = raw.get(key)
    absent = {"temperature": 1.0, "top_p": 1.0, "do_sample": True}
    return absent[key] if value is None else value


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(
            f"{path}: not readable as JSON ({error}), expected an object; fetch the file again"
        ) from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: a JSON {type(raw).__name__}, expected an object; fetch the file again")
    return raw
