"""What a CUDA card is called and can do."""

from __future__ import annotations

import re
from functools import cache

import torch


def card_name(device: torch.device) -> str:
    """The card's name as a file name: "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


@cache
def is_chainable(device: torch.device) -> bool:
    """Whether a kernel may start, and fetch weights, before the one before it in the stream has ended: since sm_90."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
