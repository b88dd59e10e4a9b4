"""`runtime tune`: parses, measures ladders, pool shares and prefetch, prints. Chooses nothing itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime import cli_options as option
from runtime.cli_output import RESUMES, print_measurement, told_at_interrupt


def tune(
    text: Annotated[
        list[Path], typer.Option("--text", help="Held-out text: a file, one document; or .jsonl, one a line.")
    ],
    model: option.Model = "demo",
    max_ppl_ratio: Annotated[
        float,
        typer.Option(
            "--max-ppl-ratio",
            help="Perplexity by that of exact that may not be exceeded, with one standard error on top; at least 1.",
        ),
    ] = 1.02,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to score, over all documents.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a run.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Tokens of the prefill before.")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of a trial, after an unrecorded one.")] = 3,
    device: option.Device = None,
    dtype: option.Dtype = None,
    vram: option.Vram = None,
    ram: option.Ram = None,
    context: option.Context = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be tried, and end.")] = False,
) -> None:
    """Find the fastest ladder, pool shares and prefetch within a quality budget; chat and generate then use them. Resumes."""
    from kernels.measurement import document
    from runtime.devices import compute_device
    from runtime.eval_rows import read_model
    from runtime.tune import plan_for, results, save, table
    from runtime.tune import tune as tune_model
    from runtime.tune_trials import TuneSettings

    if not max_ppl_ratio >= 1:  # NaN is not either
        raise typer.BadParameter(f"--max-ppl-ratio {max_ppl_ratio}: expected at least 1, which exact has")
    opened = read_model(model)
    plan = plan_for(opened)
    settings = TuneSettings(
        texts=tuple(text),
        tokens=tokens,
        steps=steps,
        prompt_tokens=prompt_tokens,
        repeat=repeat,
        context=context,
        device=compute_device(device),
        dtype=dtype,
        vram=vram,
        ram=ram,
    )
    if dry_run:
        typer.echo("\n".join(plan.lines(max_ppl_ratio, settings, opened.directory)))
        return
    with told_at_interrupt(RESUMES):
        trials = tune_model(opened, plan, settings, max_ppl_ratio, lambda line: typer.echo(line, err=True))
    found = results(trials, max_ppl_ratio)
    typer.echo("\n".join(table(found)))
    measurement = document("ladders, pool shares and prefetch", "runtime.cli", found, opened.directory)
    path = save(opened, trials, max_ppl_ratio, settings, measurement["machine"])
    typer.echo(f"{path}: written; chat and generate use it", err=True)
    print_measurement(measurement)
