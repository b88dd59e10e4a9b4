"""`runtime bench`: parses, times answers to a set of prompts or ways to prefetch on one sequence, prints. Times nothing itself."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime import cli_options as option
from runtime.cli_options import refuse_options
from runtime.cli_output import print_measurement, save_measurement, told_at_interrupt
from runtime.cli_session import OpenOptions, chat_options, open_session, sampling_for

if TYPE_CHECKING:
    from runtime.answering import Sampling
    from runtime.bench_prompts import BenchPrompt
    from runtime.engine import Session


def bench(
    model: option.Model = "demo",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Answer these prompts: a .json set; default: the one that ships.")
    ] = None,
    force_tokens: Annotated[
        Path | None,
        typer.Option("--force-tokens", help="Replay a sequence instead: a text file, or a .json list of token ids."),
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", min=2, help="Runs of each prompt (3) or variant (5), in turn.")
    ] = None,
    variants: Annotated[
        str | None, typer.Option("--variants", help="Replay: off, hash, predictor, evicting, polling.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Replay: timed steps of a run (128).")] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, help="Replay: tokens of the prefill before (32).")
    ] = None,
    device: option.Device = None,
    dtype: option.Dtype = None,
    ladder: Annotated[
        str | None, typer.Option("--ladder", help="As in chat; default: auto for prompts, exact for a replay.")
    ] = None,
    renormalise: option.Renormalise = True,
    code: option.Code = None,
    slots: option.Slots = None,
    vram: option.Vram = None,
    ram: option.Ram = None,
    prefetch: Annotated[
        str | None, typer.Option("--prefetch", help="Prompts: as in chat. A replay has --variants.")
    ] = None,
    verify_reads: option.VerifyReads = False,
    mirror: option.Mirrors = [],  # noqa: B006 - typer copies it
    context: option.Context = None,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Prompts: of each one's first run (0).")] = None,
    guard: option.Guard = True,
    junk: option.Junk = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Prompts: write each run's transcript, and the JSON, to this directory."),
    ] = None,
) -> None:
    """Measure speed: of answers to a set of prompts, or of ways to prefetch on one sequence. A table, then one JSON document as the last line."""
    options = OpenOptions(  # ladder and prefetch are by the way to run
        device=device,
        dtype=dtype,
        renormalise=renormalise,
        code=code,
        slots=slots,
        vram=vram,
        ram=ram,
        verify_reads=verify_reads,
        mirrors=mirror,
        context=context,
    )
    if force_tokens is not None:
        of_prompts: dict[str, object] = {
            "--prompts": prompts,
            "--prefetch": prefetch,
            "--temperature": temperature,
            "--top-p": top_p,
        }
        of_prompts |= {"--seed": seed, "--no-guard": None if guard else True, "--junk": junk or None, "--out": out}
        refuse_options("--force-tokens", of_prompts)
        names = "off,hash,predictor" if variants is None else variants
        lengths = (5 if repeat is None else repeat, tokens or 128, prompt_tokens or 32)
        options = replace(options, ladder="exact" if ladder is None else ladder)
        _bench_replay(model, options, force_tokens, names, lengths)
        return
    refuse_options("--prompts", {"--variants": variants, "--tokens": tokens, "--prompt-tokens": prompt_tokens})
    from runtime.bench_prompts import LEAST_REPEAT, SHIPPED, read_prompts

    repeat = LEAST_REPEAT if repeat is None else repeat
    if repeat < LEAST_REPEAT:
        raise typer.BadParameter(f"--repeat {repeat}: answers differ from run to run, expected at least {LEAST_REPEAT}")
    chosen = read_prompts(prompts or SHIPPED)
    ladder, prefetch = ("auto" if choice is None else choice for choice in (ladder, prefetch))
    session = open_session(model, replace(options, ladder=ladder, prefetch=prefetch))
    # The length is each prompt's own.
    sampling = sampling_for(session, 1, temperature, top_p, seed or 0, guard=guard, junk=junk)
    _bench_prompts(session, chosen, sampling, repeat, out)


def _bench_prompts(
    session: Session, prompts: list[BenchPrompt], sampling: Sampling, repeat: int, out: Path | None
) -> None:
    from tqdm import tqdm

    from kernels.measurement import document
    from runtime.bench_prompts import RESULT, PromptRun, results, run_prompts, save_transcript, table

    drawn = asdict(sampling)
    del drawn["max_new_tokens"]  # each prompt has its own
    asked = {"set": [asdict(prompt) for prompt in prompts], "repeat": repeat, "sampling": drawn}
    asked |= {"experts": session.experts_line}
    runs, planned = list[PromptRun](), repeat * len(prompts)
    measured = run_prompts(session, prompts, sampling, repeat, chat_options(session.config))
    with told_at_interrupt("interrupted; --out has the runs that have ended" if out else "interrupted"):
        for run in tqdm(measured, desc="bench", total=planned, unit="run", disable=None):
            runs.append(run)
            found = results(runs) | asked | {"planned_runs": planned}
            measurement = document("answers to a set of prompts", "runtime.cli", found, session.directory)
            if out is not None:
                save_transcript(out, run)
                save_measurement(
                    measurement, out / RESULT
                )  # after each one: transcripts and numbers are of the same runs
    typer.echo("\n".join(table(found)))
    print_measurement(measurement)


def _bench_replay(
    model: str, options: OpenOptions, force_tokens: Path, variants: str, lengths: tuple[int, int, int]
) -> None:
    from runtime.bench_variants import parse_variants, prefetch_for

    names = parse_variants(variants)
    session = open_session(model, replace(options, prefetch=prefetch_for(names)))
    from tqdm import tqdm

    from kernels.measurement import document
    from runtime.bench import BenchSettings, forced_ids, run_bench
    from runtime.bench_report import results, table

    settings = BenchSettings(names, *lengths)
    measured = run_bench(session, forced_ids(force_tokens, session), settings)
    runs = list(tqdm(measured, desc="bench", total=settings.repeat * len(names), unit="run", disable=None))
    found = results(runs, settings) | {"experts": session.experts_line}
    typer.echo("\n".join(table(found)))
    print_measurement(document(f"{variants} on forced tokens", "runtime.cli", found, session.directory))
