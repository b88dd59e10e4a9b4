"""A model with all experts resident, opened from a checkpoint, for tests of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.model import DeepseekV4
from runtime.models.deepseek_v4.state import State
from runtime.models.rounding import ActivationRounding
from runtime.resident import ResidentExperts


@dataclass(frozen=True)
class PlainModel:
    """The forward pass without the engine around it."""

    model: DeepseekV4
    experts: ResidentExperts
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def open(
        cls,
        directory: Path,
        rounding: ActivationRounding | None = None,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep_fp8: bool = False,
    ) -> PlainModel:
        """Opens `directory`."""
        rounding, place = rounding or ActivationRounding(), torch.device(device)
        checkpoint = Checkpoint(directory)
        model = build_model(checkpoint, dtype, place, rounding, keep_fp8)
        experts = ResidentExperts(checkpoint, dtype, place, rounding.linear)
        checkpoint.close()
        return cls(model, experts, dtype, place)

    def state(self, context: int = 512) -> State:
        """An empty state."""
        return State(self.model.config, context, self.dtype, self.device)

    def logits(self, token_ids: Sequence[int] | Tensor, state: State | None = None) -> Tensor:
        """float32 [T, V] of one chunk, on `state` or a fresh one."""
        with torch.inference_mode():
            ids = torch.as_tensor(token_ids, device=self.device)
            return self.model.logits(self.model.forward(ids, state or self.state(), self.experts))
