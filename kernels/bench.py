"""`python -m kernels.bench`: how near each operator comes to what the memory allows. Owns the comparison; operators own their cases.

Inside the timed window: replays of one captured graph that runs an operator on several sets of inputs in turn, so many that
they pass the cache by far, divided by the number of runs. A launch in a graph is part of it; Python is not. The yardstick is a
kernel that reads as many bytes, in as many sets, and does nothing with them, in the same run. From compute capability 9 on an
FP8 product fetches its first weights while the run before it ends, as it does in a layer; the yardstick's kernels do not overlap.
A case whose result does not agree with its definition gets no number, and the command then ends with exit code 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from kernels import tuning
from kernels.cases import Case, relative_rms
from kernels.measurement import document
from kernels.sweep import sweep_us
from kernels.timing import eager_us, graph_us, num_sets

OPS = (
    "expert_gemv",
    "expert_gemm",
    "fp8_linear",
    "hyper_connections",
    "decode_attention",
    "router",
    "norm",
    "dense_layer",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case measured; numbers are None where `error` is over `tolerance`."""

    op: str
    name: str
    error: float | None  # None is no number at all
    tolerance: float
    read_bytes: int
    us: float | None = None
    gb_per_s: float | None = None
    sweep_us: float | None = None
    share: float | None = None  # of the yardstick's speed
    reference_us: float | None = None
    library: str | None = None
    library_us: float | None = None


def error_of(case: Case, inputs: Any) -> float:
    """Relative RMS error of a run into outputs that held NaN before it."""
    result = case.run(inputs)
    result.fill_(torch.nan if result.is_floating_point() else -1)
    result = case.run(inputs).clone()
    return relative_rms(result, case.reference(inputs))


def measure(case: Case, device: torch.device) -> Row:
    """The case checked on one set of inputs, then timed on several."""
    sets = [case.make(seed, device) for seed in range(num_sets(case.read_bytes))]
    error = error_of(case, sets[0])
    row = Row(case.op, case.name, error if math.isfinite(error) else None, case.tolerance, case.read_bytes)
    if not error <= case.tolerance:
        return row
    us, sweep = graph_us([lambda inputs=each: case.run(inputs) for each in sets]), sweep_us(case.read_bytes, device)  # type: ignore[misc]
    return Row(
        **asdict(row)
        | {"us": us, "gb_per_s": case.read_bytes / us / 1e3, "sweep_us": sweep, "share": sweep / us}
        | {"reference_us": eager_us(lambda: case.reference(sets[0]))}
        | _library(case, sets)
    )


def _library(case: Case, sets: Sequence[Any]) -> dict[str, Any]:
    if case.library is None:
        return {}
    name, call = case.library
    return {"library": name, "library_us": graph_us([lambda inputs=each: call(inputs) for each in sets])}  # type: ignore[misc]


def table(rows: Sequence[Row]) -> list[str]:
    """Rows as lines for the user."""
    lines = [f"{'operator':18} {'case':28} {'error':>8} {'µs':>8} {'GB/s':>7} {'sweep':>6} {'x torch':>8}  library"]
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.1e}"
        head = f"{row.op:18} {row.name:28} {error:>8} "
        if row.us is None or row.reference_us is None:
            lines.append(f"{head}wrong: expected an error of at most {row.tolerance:g}, no number")
            continue
        library = f"{row.library} {row.library_us / row.us:.2f} x" if row.library and row.library_us else ""
        numbers = f"{row.us:8.1f} {row.gb_per_s:7.0f} {row.share:6.0%} {row.reference_us / row.us:8.1f}"
        lines.append(f"{head}{numbers}  {library}".rstrip())
    return lines


app = typer.Typer(add_completion=False)


@app.command()
def main(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Operators; default: {', '.join(OPS)}.")] = None,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    tune: Annotated[bool, typer.Option(help="Write this card's configurations to the repository's table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON document here too.")] = None,
) -> None:
    """Check and time every operator on this machine's CUDA device. A table, then one JSON document as the last line."""
    if not torch.cuda.is_available():
        raise SystemExit("kernels.bench: no CUDA device, expected one; run it on a machine that has one")
    unknown = set(ops or ()) - set(OPS)
    if unknown:
        raise SystemExit(f"kernels.bench: operators {', '.join(sorted(unknown))}, expected some of {', '.join(OPS)}")
    device = torch.device("cuda", torch.cuda.current_device())
    rows = []
    cases = [case for op in ops or OPS for case in import_module(f"kernels.{op}.cases").cases() if only in case.name]
    for case in tqdm(cases, desc="kernels", unit="case", disable=None):
        rows.append(measure(case, device))
        torch.cuda.empty_cache()
    wrong = [f"{row.op} {row.name}" for row in rows if row.us is None]
    if tune and not wrong:
        tuning.ship(device)
    typer.echo("\n".join(table(rows)))
    measured = json.dumps(
        document("operators against a read-only sweep", "kernels.bench", [asdict(row) for row in rows])
    )
    if out is not None:
        out.write_text(measured + "\n")
    typer.echo(measured)
    if wrong:
        raise SystemExit(f"kernels.bench: wrong results, expected none: {', '.join(wrong)}")


if __name__ == "__main__":
    app()
