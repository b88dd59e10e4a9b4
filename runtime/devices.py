"""Which device a command runs on: a name from the user, or the best there is."""

from __future__ import annotations

import re

import torch

from runtime.errors import StrawError


def compute_device(name: str | None) -> str:
    """`name` as "cpu", "cuda" or "cuda:i"; without one the best there is: "cuda" where there is a CUDA device, else "cpu".

    Raises:
        StrawError: It is no device of this machine.
    """
    found = torch.cuda.device_count()
    if name is None:
        return "cuda" if found else "cpu"
    match = re.fullmatch(r"cpu(?::0)?|cuda(?::([0-9]{1,4}))?", name)
    if match is None or (name.startswith("cuda") and int(match[1] or 0) >= found):
        raise StrawError(f"device is {name!r}, expected cpu or one of {found} CUDA devices (cuda:i); correct --device")
    if name.startswith("cpu"):
        return "cpu"
    return f"cuda:{int(match[1])}" if match[1] else "cuda"
