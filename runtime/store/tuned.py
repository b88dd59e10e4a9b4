"""`runtime.toml` in a model directory: what suits this machine and this model better than the defaults. Owns its keys.

`runtime tune` writes it; a person may, too. What it says counts where the user says nothing (`auto`). What was measured on other
weights or with another 2-bit code counts nowhere: such a file is refused, not passed over.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import StrawError
from runtime.files import atomic_file
from runtime.ladder import parse_ladder
from runtime.manifest import MANIFEST, read_manifest
from runtime.store.pools import Shares, parse_bytes

TUNED = "runtime.toml"
AUTO = "auto"
PREFETCHES = ("off", "hash", "predictor")  # as `runtime.predictors` has them, which lies above the store
ANY_NUM_PICKS = 2**31  # whether a ladder fits the model's K is seen when it is used
FREE = "free"  # in the place of a budget that was not given
NO_CODE = "none"
MEASURED = {  # what the choice rests on, and of which type
    "when": str,
    "text": str,
    "tokens": int,  # scored for the perplexity
    "steps": int,  # timed in each run
    "fingerprint": str,  # of the model's source
    "code": str,
    "device": str,
    "machine": str,
    "vram": str,
    "ram": str,
    "max_ppl_ratio": float,
    "ppl_ratio": float,
    "standard_error": float,  # of that ratio
    "ms_per_token": float,
    "exact_ms_per_token": float,
}
HEADER = "# Written by `runtime tune`. chat and generate use it where the command line says nothing; remove it for the defaults."


@dataclass(frozen=True, slots=True)
class Tuned:
    """The settings of a file, the defaults where it says nothing; `measured` has some of the keys of MEASURED."""

    shares: Shares = field(default_factory=Shares)
    ladder: str | None = None
    prefetch: str | None = None
    measured: Mapping[str, str | int | float] = field(default_factory=dict)


def write_tuned(directory: Path, tuned: Tuned) -> Path:
    """The file's path; it appears whole or not at all.

    Raises:
        ArtifactError: The system refused to write.
    """
    lines = [HEADER]
    lines += [f"{name} = {_value(text)}" for name in ("ladder", "prefetch") if (text := getattr(tuned, name))]
    lines += ["", "[pools]", *(f"{name} = {share!r}" for name, share in tuned.shares._asdict().items())]
    lines += ["", "[measured]", *(f"{name} = {_value(value)}" for name, value in tuned.measured.items())]
    with atomic_file(directory / TUNED) as file:
        file.write("\n".join(lines).encode() + b"\n")
    return directory / TUNED


def read_tuned(directory: Path) -> Tuned:
    """The settings in `directory`, all defaults if it has no such file.

    Raises:
        StrawError: The file is no TOML, has a key or a value that means nothing here, or was measured on another model or code.
    """
    path = directory / TUNED
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Tuned()
    except (OSError, ValueError) as error:
        raise _damaged(path, f"not readable as TOML ({error}), expected key = value lines") from None
    unknown = sorted(content.keys() - {"ladder", "prefetch", "pools", "measured"})
    if unknown:
        raise _damaged(path, f"found {unknown[0]}, expected ladder, prefetch and the tables [pools] and [measured]")
    ladder, prefetch = content.get("ladder"), content.get("prefetch")
    if ladder is not None:
        _check_ladder(path, ladder)
    if prefetch is not None and prefetch not in PREFETCHES:
        raise _damaged(path, f"prefetch is {prefetch!r}, expected {', '.join(PREFETCHES)}")
    measured = _measured(path, content)
    if (directory / MANIFEST).exists():
        manifest = read_manifest(directory)
        check_measured_on(path, measured, fingerprint=manifest.fingerprint, code=manifest.code or NO_CODE)
    return Tuned(_shares(path, content.get("pools", {})), ladder, prefetch, measured)


def check_measured_on(path: Path, measured: Mapping[str, object], **used: str) -> None:
    """Nothing, if what the file says of the model's `fingerprint` and `code`, if anything, is what is used.

    Raises:
        StrawError: It was measured on others.
    """
    for name, own in used.items():
        found = measured.get(name, own)
        if found != own:
            raise StrawError(
                f"{path}: measured on {name} {str(found)[:16]}, this model has {own[:16]} in use; run runtime tune again, or remove the file"
            )


def taken_line(
    tuned: Tuned, *, ladder: str, prefetch: str, has_slots: bool, vram: str | None = None, ram: str | None = None
) -> str | None:
    """What a session takes from the file where the user said `auto`, in a line for people; None if nothing.

    The line ends with a warning where the budgets are not those that the file was measured with.

    Args:
        tuned: Of the file.
        ladder: The user's choice.
        prefetch: Likewise.
        has_slots: Whether the user counts the slots, so that no share matters.
        vram: The user's budget, None for what is free.
        ram: Likewise.
    """
    words = [f"ladder {tuned.ladder}"] if ladder == AUTO and tuned.ladder else []
    words += [f"prefetch {tuned.prefetch}"] if prefetch == AUTO and tuned.prefetch else []
    if not has_slots and tuned.shares != Shares():
        words.append(f"FP4 shares {tuned.shares.fp4_vram:g} in VRAM and {tuned.shares.fp4_ram:g} in RAM")
    if not words:
        return None
    measured = tuned.measured
    notes = [f"measured {measured['when']}"] if "when" in measured else []
    notes += [f"for {name} {measured[name]}" for name in ("vram", "ram") if name in measured]
    own = {"vram": vram, "ram": ram}
    is_other = {name: name in measured and not _is_same(measured[name], budget) for name, budget in own.items()}
    others = [] if has_slots else [f"{name} is {own[name] or FREE}" for name in own if is_other[name]]
    line = f"{TUNED}: {', '.join(words)}" + (f" ({', '.join(notes)})" if notes else "")
    return (
        f"{line}; {' and '.join(others)} now, another choice may be better: run runtime tune again" if others else line
    )


def _is_same(measured: object, budget: str | None) -> bool:
    """Whether two budgets are as many bytes, or neither was given."""
    if budget is None or measured == FREE:
        return (budget or FREE) == measured
    return parse_bytes(str(measured)) == parse_bytes(budget)


def _check_ladder(path: Path, ladder: object) -> None:
    try:
        parse_ladder(str(ladder) if isinstance(ladder, str) else "", ANY_NUM_PICKS)
    except StrawError:
        raise _damaged(path, f"ladder is {ladder!r}, expected a,b or exact or mass:hi,lo in quotes") from None


def _shares(path: Path, pools: object) -> Shares:
    if not isinstance(pools, dict) or not pools.keys() <= set(Shares._fields):
        raise _damaged(path, f"found {pools}, expected a table [pools] with {' and '.join(Shares._fields)}")
    for name, share in pools.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise _damaged(path, f"pools.{name} is {share!r}, expected a share from 0 to 1")
    return Shares(**{name: float(share) for name, share in pools.items()})


def _measured(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    measured = content.get("measured", {})
    if not isinstance(measured, dict) or not measured.keys() <= MEASURED.keys():
        raise _damaged(path, f"found {measured}, expected a table [measured] with some of {', '.join(MEASURED)}")
    for name, value in measured.items():
        kinds = (int, float) if MEASURED[name] is float else MEASURED[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise _damaged(path, f"measured.{name} is {value!r}, expected {MEASURED[name].__name__}")
    return measured


def _damaged(path: Path, what: str) -> StrawError:
    return StrawError(f"{path}: {what}; correct or remove it")


def _value(value: object) -> str:
    """As TOML: numbers as they are, text as JSON spells it, which escapes all but one of what TOML forbids."""
    if not isinstance(value, str):
        return repr(value)
    text = value.encode(errors="replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
