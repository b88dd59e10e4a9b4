"""`runtime eval`: parses, scores ladders against exact or compares with published vectors, prints. Scores nothing itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime import cli_options as option
from runtime.cli_options import refuse_options
from runtime.cli_output import RESUMES, print_measurement, told_at_interrupt
from runtime.cli_session import OpenOptions, chat_options, open_session

if TYPE_CHECKING:
    from runtime.eval_rows import Model, Row
    from runtime.sweep import EvalSettings
    from runtime.sweep_report import Speed
    from runtime.sweep_speed import SpeedSettings


def evaluate(
    model: option.Model = "demo",
    text: Annotated[
        list[Path], typer.Option("--text", help="A text file, one document; or .jsonl, one a line with the key text.")
    ] = [],  # noqa: B006 - typer copies it
    tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="At most so many, over all documents.")] = None,
    document_tokens: Annotated[
        int | None, typer.Option("--document-tokens", min=1, help="At most so many of each document, its first ones.")
    ] = None,
    ladder: Annotated[
        list[str], typer.Option("--ladder", help="a,b or exact or mass:hi,lo; may be given several times.")
    ] = [],  # noqa: B006 - typer copies it
    residency: Annotated[
        list[str],
        typer.Option(
            "--residency",
            help="What the ladder finds resident: none, all, random:SHARE, replay:F,R,f,r by rule; cold or warm: the real"
            " pools, token by token. May be given several times; default: none.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    sweep: Annotated[bool, typer.Option("--sweep", help="All ladders, with every 2-bit code that is there.")] = False,
    speed_prompt: Annotated[
        str | None,
        typer.Option(
            "--speed-prompt",
            help="With --sweep: time three answers to this prompt of the set (article is the slowest one that ships) under"
            " each ladder, on real pools within --vram and --ram.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="With --speed-prompt: a .json set; default: the one that ships.")
    ] = None,
    speeds: Annotated[
        Path | None, typer.Option("--speeds", help="With --sweep: tokens per second measured before, by ladder, JSON.")
    ] = None,
    vectors: Annotated[
        Path | None, typer.Option("--vectors", help="Compare with published continuations and log-probabilities, JSON.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the JSON here; what is finished is kept beside it.")
    ] = None,
    device: option.Device = None,
    dtype: option.Dtype = None,
    renormalise: option.Renormalise = True,
    code: option.Code = None,
    slots: option.Slots = None,
    vram: option.Vram = None,
    ram: option.Ram = None,
    context: option.Context = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random residency.")] = 0,
) -> None:
    """Measure what a ladder costs against the exact model on held-out text. Prints a table, then one JSON document as the last line."""
    _check_out(out, [*text, *(path for path in (vectors, speeds, prompts) if path is not None)])
    if vectors is not None:
        others: dict[str, object] = {"--text": text or None, "--residency": residency or None, "--sweep": sweep or None}
        others |= {"--tokens": tokens, "--document-tokens": document_tokens, "--speeds": speeds, "--prompts": prompts}
        refuse_options("--vectors", others | {"--speed-prompt": speed_prompt, "--seed": seed or None})
        if len(ladder) > 1:
            raise typer.BadParameter("--vectors takes one --ladder at most")
        options = OpenOptions(
            device=device,
            dtype=dtype,
            ladder=ladder[0] if ladder else "exact",
            renormalise=renormalise,
            code=code,
            slots=slots,
            vram=vram,
            ram=ram,
            context=context,
        )
        _print_vectors(model, options, vectors, out)
        return
    of_sweep: dict[str, object] = {"--speeds": speeds, "--speed-prompt": speed_prompt, "--prompts": prompts}
    _check_sweep_options(sweep, of_sweep)
    if not text or not (ladder or sweep):
        raise typer.BadParameter("expected --text FILE with --ladder or --sweep, or --vectors FILE")
    if sweep and (ladder or residency or code or not renormalise):
        raise typer.BadParameter("--sweep chooses --ladder, --residency, --code and --renormalise itself")
    from runtime.devices import compute_device
    from runtime.eval_rows import Row, read_model, sweep_rows
    from runtime.sweep import EvalSettings
    from runtime.sweep_report import read_speeds

    opened = read_model(model)
    pairs = [(one, form) for one in ladder for form in residency or ["none"]]
    rows = sweep_rows(opened) if sweep else [Row(code or opened.code, one, renormalise, form) for one, form in pairs]
    known = {} if speeds is None else read_speeds(speeds, rows)
    timing = None if speed_prompt is None else speed_settings(opened, speed_prompt, prompts)
    settings = EvalSettings(
        texts=tuple(text),
        tokens=tokens,
        document_tokens=document_tokens,
        context=context,
        device=compute_device(device),
        dtype=dtype,
        seed=seed,
        slots=slots,
        vram=vram,
        ram=ram,
        out=out,
    )
    _print_ladders(opened, settings, rows, known, timing, with_picture=sweep)


def _check_out(out: Path | None, sources: list[Path]) -> None:
    """Raises BadParameter if `--out` is no name of a file, or what is written there or beside it would be one of the sources."""
    if out is None:
        return
    if not out.name or out.name == ".." or out.is_dir():
        raise typer.BadParameter(f"--out {out}: a directory, expected a file to write")
    from runtime.sweep import STATE
    from runtime.sweep_report import PICTURE
    from runtime.sweep_speed import STATE as SPEED_STATE

    written = [out, out.with_name(PICTURE), out.with_suffix(STATE), out.with_suffix(SPEED_STATE)]
    for path in written:
        if path.resolve() in [source.resolve() for source in sources]:
            raise typer.BadParameter(f"--out {out}: it would overwrite {path}, which is read; name another one")


def _check_sweep_options(sweep: bool, given: dict[str, object]) -> None:
    """Raises BadParameter if options about speed are given without a sweep, or do not go together."""
    if not sweep:
        refuse_options("rows without --sweep", given)
    if given["--prompts"] is not None and given["--speed-prompt"] is None:
        raise typer.BadParameter("--prompts needs --speed-prompt")
    if given["--speeds"] is not None and given["--speed-prompt"] is not None:
        raise typer.BadParameter("give --speeds or --speed-prompt, not both")


def speed_settings(opened: Model, name: str, prompts: Path | None) -> SpeedSettings:
    """How `--speed-prompt` is timed: the prompt of that name, from a file or the set that ships, drawn as the model says.

    Raises:
        StrawError: The set has no such prompt, or cannot be read.
    """
    from runtime.answering import Sampling
    from runtime.bench_prompts import SHIPPED, read_prompts
    from runtime.sampler import SamplingDefaults
    from runtime.sweep_speed import SpeedSettings, choose_prompt

    prompt = choose_prompt(read_prompts(prompts or SHIPPED), name)
    defaults = SamplingDefaults.from_directory(opened.directory)
    sampling = Sampling(prompt.tokens, defaults.temperature, defaults.top_p, seed=0)
    return SpeedSettings(prompt, sampling, chat_options(opened.config))


def _print_ladders(
    opened: Model,
    settings: EvalSettings,
    rows: list[Row],
    known: dict[str, Speed],
    timing: SpeedSettings | None,
    with_picture: bool,
) -> None:
    from kernels.measurement import document
    from runtime.sweep import run
    from runtime.sweep_report import PICTURE, draw, table, with_speeds
    from runtime.sweep_speed import measure_speeds

    out, warn, answers = settings.out, partial(typer.echo, err=True), dict[str, Any]()
    with told_at_interrupt(RESUMES if out else "interrupted; with --out what is finished would be kept"):
        results = run(opened, settings, rows, warn)
        if timing is not None:
            known, answers = measure_speeds(opened, settings, rows, timing, warn)
    typer.echo("\n".join(table(results, known)))
    if with_picture and out is not None:
        typer.echo(draw(results, known, out.with_name(PICTURE)))
    found = with_speeds(results, known) if known else results
    measurement = document("ladders against the exact model", "runtime.cli", found, opened.directory)
    print_measurement(measurement | ({"answers": answers} if answers else {}), out)


def _print_vectors(model: str, options: OpenOptions, path: Path, out: Path | None) -> None:
    from kernels.measurement import document
    from runtime.vectors import compare, lines, read_vectors, reader_of

    vectors = read_vectors(path, reader_of(model, options.context))  # before a model that takes minutes to open
    session = open_session(model, options)
    with told_at_interrupt("interrupted"):
        found = [compare(session, vector) for vector in vectors]
    typer.echo("\n".join(lines(found)))
    print_measurement(document("published vectors", "runtime.cli", found, session.directory), out)
