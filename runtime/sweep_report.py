"""The results of an evaluation for people: a table, and the picture of a sweep. Measures nothing."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import StrawError
from runtime.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from runtime.eval_rows import Row

PICTURE = "ladder.png"
LINEAR_NATS = 0.02  # of the loss axis; logarithmic above
COLORS = {"int2": "tab:orange", "quad2": "tab:blue", "split": "tab:green"}
COLUMNS = (
    ("loss", 9),
    ("±", 8),
    ("vs exact", 10),
    ("±", 8),
    ("ppl ratio", 11),
    ("±", 8),
    ("KL mean", 10),
    ("median", 10),
    ("p99", 9),
    ("agree", 8),
    ("±", 8),
    ("FP4", 7),
    ("2-bit", 7),
    ("drop", 7),
    ("NVMe MB", 9),
    ("V4-Flash", 9),
)
HEADINGS = "".join(f"{name:>{width}}" for name, width in COLUMNS)


@dataclass(frozen=True, slots=True)
class Speed:
    """A measured speed; `invalid` says why it counts for nothing, None if it counts."""

    tokens_per_second: float
    invalid: str | None = None


def table(results: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed]) -> list[str]:
    """The rows as lines: ± is one standard error, loss and KL are nats per token, uses are picks of a token."""
    width = max(len("row"), *(len(_name(row)) for row in results))
    lines = [f"{'row':{width}}{HEADINGS}{' tokens/s' if speeds else ''}"]
    for row in results:
        speed = _speed(speed_of(row, speeds)) if speeds else ""
        lines.append(f"{_name(row):{width}}{_numbers(row)}{_uses(row)}{speed}")
    first = results[0]
    note = f"{first['tokens']:,} tokens; ± over {first['clusters']} {first['clusters_are']}"
    return [*lines, note]


def _name(row: Mapping[str, Any]) -> str:
    renormalise = "" if row["renormalise"] else " no-renormalise"
    return f"{row['code'] or 'no code'} {row['ladder']}{renormalise} {row['residency']}"


def _numbers(row: Mapping[str, Any]) -> str:
    pairs = [row[name] for name in ("loss", "loss_difference", "perplexity_ratio")]
    losses = "".join(_pair(figure, width) for figure, width in zip(pairs, (9, 10, 11), strict=True))
    kl_mean, median, p99 = (row[f"kl_{name}"]["value"] for name in ("mean", "median", "p99"))
    return f"{losses}{kl_mean:10.5f}{median:10.5f}{p99:9.4f}{_pair(row['agreement'], 8)}"


def _pair(figure: Mapping[str, Any], width: int) -> str:
    error = "" if figure["standard_error"] is None else f"{figure['standard_error']:.4f}"
    return f"{figure['value']:{width}.4f}{error:>8}"


def _uses(row: Mapping[str, Any]) -> str:
    """Picks by what served them, then MB read per token, here and at V4-Flash's size; a rule without pools knows no reads."""
    uses = "".join(f"{count:7.2f}" for count in row["uses_per_token"].values())
    known = (row["nvme_bytes_per_token"], row["v4_flash_nvme_bytes_per_token"])
    return uses + "".join(f"{'–':>9}" if count is None else f"{count / 1e6:9,.2f}" for count in known)


def _speed(speed: Speed | None) -> str:
    if speed is None:
        return f"{'–':>9}"
    return f"{speed.tokens_per_second:9.2f}" if speed.invalid is None else f"  invalid: {speed.invalid}"


def read_speeds(path: Path, rows: Sequence[Row]) -> dict[str, Speed]:
    """Measured speeds from a JSON object {ladder: {"tokens_per_second": number, "invalid": reason or null}}.

    A key is a ladder, which holds for every code, or a code and a ladder, as `quad2 2,4`; ` no-renormalise` behind it where
    that was so. `invalid` may be left out.

    Raises:
        StrawError: The file cannot be read or is something else, or an entry is of none of the rows.
    """
    try:
        found = json.loads(path.read_bytes())
        speeds = {str(name): _read_speed(str(name), one) for name, one in found.items()}
        known = {name for row in rows for name in speed_names(asdict(row))}
        unknown = [name for name in speeds if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0][:40]!r} is no ladder of this sweep")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StrawError(
            f'{path}: cannot be read as speeds ({reason}), expected {{"2,4": {{"tokens_per_second": 7.75, "invalid": null}}}}; name another --speeds'
        ) from None
    return speeds


def _read_speed(name: str, found: Any) -> Speed:
    if not isinstance(found, dict) or not found.keys() <= {"tokens_per_second", "invalid"}:
        raise ValueError(f"{name[:40]!r} has something else than tokens_per_second and invalid")
    value, invalid = found["tokens_per_second"], found.get("invalid")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name[:40]!r} has {str(value)[:20]} tokens per second, not a number above 0")
    if invalid is not None and not isinstance(invalid, str):
        raise ValueError(f"{name[:40]!r} has {str(invalid)[:20]} as invalid, not a reason or null")
    return Speed(float(value), invalid)


def speed_names(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row's speed is called: with its code, and for every code."""
    ladder = row["ladder"] + ("" if row["renormalise"] else " no-renormalise")
    return f"{row['code']} {ladder}", ladder


def speed_of(row: Mapping[str, Any], speeds: Mapping[str, Speed]) -> Speed | None:
    """The speed that was measured for a row's code and ladder, or for its ladder; None if none was."""
    own, of_all = speed_names(row)
    return speeds.get(own) or speeds.get(of_all)


def with_speeds(results: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed]) -> list[dict[str, Any]]:
    """The rows, each with its `speed` as {"tokens_per_second", "invalid"}, None where it has none."""
    pairs = [(row, speed_of(row, speeds)) for row in results]
    return [{**row, "speed": speed and asdict(speed)} for row, speed in pairs]


def draw(results: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed], out: Path) -> str:
    """The picture at `out`, and a line about it; without matplotlib (the `plot` extra) the line alone."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"{out}: not drawn, matplotlib is missing; run: pip install 'straw[plot]'"
    with replacing(out) as temporary:
        _draw(results, speeds, temporary)
    return f"{out}: loss against NVMe bytes per token" + (" and against speed" if speeds else "")


def _draw(results: Sequence[Mapping[str, Any]], speeds: Mapping[str, Speed], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in results if row["v4_flash_nvme_bytes_per_token"] is not None]
    panels = 2 if speeds else 1
    figure = Figure(figsize=(7 * panels, 5.5), layout="constrained")
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    axes[0].set(
        xlabel="GB read per token, at V4-Flash's layers and slab sizes", ylabel="loss above exact, nats per token"
    )
    axes[0].set_yscale(
        "symlog", linthresh=LINEAR_NATS
    )  # a cliff and 1 % in one picture; what is below exact has its place too
    _scatter(axes[0], [(row["v4_flash_nvme_bytes_per_token"] / 1e9, row, None) for row in rows])
    if speeds:
        axes[1].set(xlabel="tokens per second; crossed out: invalid")
        measured = [(speed_of(row, speeds), row) for row in rows]
        _scatter(axes[1], [(speed.tokens_per_second, row, speed.invalid) for speed, row in measured if speed])
    figure.savefig(path, format="png", dpi=150)


def _scatter(panel: Axes, points: Sequence[tuple[float, Mapping[str, Any], str | None]]) -> None:
    """One point a row: filled where what is left is renormalised, crossed out where the run is invalid.

    The codes' points of a ladder lie close together, so that one name will do for them.
    """
    named: set[str] = set()
    for x, row, invalid in points:
        code, ladder, y = row["code"], row["ladder"], row["loss_difference"]["value"]
        fill, label = "full" if row["renormalise"] else "none", None if code in named else code
        panel.plot(x, y, "o", color=COLORS.get(code, "grey"), fillstyle=fill, label=label)
        if invalid is not None:
            panel.plot(x, y, "x", color="red", markersize=14, markeredgewidth=2)
        if ladder not in named:
            panel.annotate(ladder, (x, y), xytext=(6, 3), textcoords="offset points", fontsize="x-small")
        named |= {code, ladder}
    panel.grid(alpha=0.3)
    if points:
        panel.legend(fontsize="small", title="hollow: no renormalising", title_fontsize="x-small")
