"""Model directory in, tokens out. The public Python API is `open_model`; it is imported on first use, since torch is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.opening import open_model

__all__ = ["open_model"]


def __getattr__(name: str) -> Any:
    if name == "open_model":
        from runtime.opening import open_model

        return open_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
