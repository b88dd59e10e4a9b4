"""`runtime.toml` in a model directory: what suits this machine and this model better than the defaults. Owns its keys."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import StrawError
from runtime.store.pools import Shares

TUNED = "runtime.toml"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The settings of a file, the defaults where it says nothing."""

    shares: Shares = field(default_factory=Shares)


def read_tuned(directory: Path) -> Tuned:
    """The settings in `directory`, all defaults if it has no such file.

    Raises:
        StrawError: The file is no TOML, or has a key or a value that means nothing here.
    """
    path = directory / TUNED
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError) as error:
        raise StrawError(
            f"{path}: not readable as TOML ({error}), expected key = value lines; correct or remove it"
        ) from None
    pools = content.pop("pools", {})
    if content or not isinstance(pools, dict) or not pools.keys() <= set(Shares._fields):
        raise StrawError(
            f"{path}: found {sorted(content) or pools}, expected a table [pools] with {' and '.join(Shares._fields)}; correct or remove it"
        )
    for name, share in pools.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise StrawError(f"{path}: pools.{name} is {share!r}, expected a share from 0 to 1; correct or remove it")
    return Tuned(Shares(**{name: float(share) for name, share in pools.items()}))
