"""The command line `runtime`: parses, opens a session, calls one function, prints. Holds no logic."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.console import run_cli
from runtime.errors import StrawError

if TYPE_CHECKING:
    from runtime.answering import Sampling
    from runtime.bench_prompts import BenchPrompt
    from runtime.chat_template import ChatOptions
    from runtime.config import ModelConfig
    from runtime.engine import Session
    from runtime.eval_rows import Model as Measured
    from runtime.sweep_speed import SpeedSettings

RESUMES = "interrupted; the same command goes on where it stopped"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help='A model directory, a released checkpoint that fits in memory, or "demo".')]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One user turn; answer it and end.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="Read the user turn from a text file.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if there is one.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: float32 on the CPU.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens of the longest conversation.")]
Ladder = Annotated[
    str,
    typer.Option(
        "--ladder", help="a,b or exact or mass:hi,lo; auto: as tuned, else exact if all experts fit, else 2,4."
    ),
]
Renormalise = Annotated[
    bool,
    typer.Option("--renormalise/--no-renormalise", help="Whether what is left carries the weight of what is dropped."),
]
Code = Annotated[str | None, typer.Option("--code", help="int2, quad2 or split; default: the model directory's.")]
Slots = Annotated[
    str | None, typer.Option("--slots", help="F,R,f,r: experts at FP4 in VRAM and RAM, then at 2-bit only.")
]
Vram = Annotated[str | None, typer.Option("--vram", help="Budget for all the process uses there, e.g. 24GB.")]
Ram = Annotated[str | None, typer.Option("--ram", help="Budget for all the process uses there, e.g. 24GB.")]
Prefetch = Annotated[
    str,
    typer.Option(
        "--prefetch", help="off, hash or predictor: what is read before it is asked for; auto: as tuned, else off."
    ),
]
VerifyReads = Annotated[bool, typer.Option("--verify-reads", help="Check the CRC-32 of every slab that is read.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="0 is greedy; default: the model's generation_config.json.")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Default: the model's generation_config.json.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the sampler.")]
GuardOption = Annotated[
    bool, typer.Option("--guard/--no-guard", help="Roll back and go on exactly when the text turns to junk.")
]
Junk = Annotated[
    list[str],
    typer.Option("--junk", help="A text that counts as junk wherever it appears, within a word too; may be repeated."),
]
Stats = Annotated[Path | None, typer.Option("--stats", help="Write the session's counters to this JSON file.")]
Mirrors = Annotated[
    list[Path], typer.Option("--mirror", help="Another directory with the same experts/ files, best on another drive.")
]


@app.callback()
def runtime() -> None:
    """Run a DeepSeek-V4 model: model directory in, tokens out."""


@app.command()
def chat(
    model: Model = "demo",
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    system: Annotated[str, typer.Option("--system", help="System text before the first turn.")] = "",
    think: Annotated[bool, typer.Option("--think", help="Thinking mode: reasoning, then </think>, then text.")] = False,
    effort: Annotated[str | None, typer.Option("--effort", help="low, high or max, as the release has.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    ladder: Ladder = "auto",
    renormalise: Renormalise = True,
    code: Code = None,
    slots: Slots = None,
    vram: Vram = None,
    ram: Ram = None,
    prefetch: Prefetch = "auto",
    verify_reads: VerifyReads = False,
    mirror: Mirrors = [],  # noqa: B006 - typer copies it
    context: Context = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = 0,
    guard: GuardOption = True,
    junk: Junk = [],  # noqa: B006 - typer copies it
    stats: Stats = None,
) -> None:
    """Talk with the model: streaming answers, several turns. With --prompt, one answer."""
    text = _prompt_text(prompt, prompt_file)
    system = _system_text(system)
    session = _open(
        model,
        device=device,
        dtype=dtype,
        ladder=ladder,
        renormalise=renormalise,
        code=code,
        slots=slots,
        vram=vram,
        ram=ram,
        prefetch=prefetch,
        verify_reads=verify_reads,
        mirrors=mirror,
        context=context,
    )
    sampling = _sampling(
        session, max_new_tokens, temperature, top_p, seed, thinking=think, guard=guard, junk=tuple(junk)
    )
    from runtime.chat import Conversation, answer, converse, require_tokenizer

    conversation = Conversation(require_tokenizer(session), _chat_options(session.config, think, effort), system)
    if text is None:
        converse(session, conversation, sampling)
    else:
        answer(session, conversation, text, sampling)
    _write_stats(session, stats)


@app.command()
def generate(
    model: Model = "demo",
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, after BOS, without turns.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    ladder: Ladder = "auto",
    renormalise: Renormalise = True,
    code: Code = None,
    slots: Slots = None,
    vram: Vram = None,
    ram: Ram = None,
    prefetch: Prefetch = "auto",
    verify_reads: VerifyReads = False,
    mirror: Mirrors = [],  # noqa: B006 - typer copies it
    context: Context = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = 0,
    guard: GuardOption = True,
    junk: Junk = [],  # noqa: B006 - typer copies it
    stats: Stats = None,
) -> None:
    """Answer one prompt and print the text alone: as it comes at exact or with --no-guard; else whole, as the guard may withdraw some."""
    text = _prompt_text(prompt, prompt_file)
    if text is None:
        raise typer.BadParameter("expected --prompt TEXT or --prompt-file FILE")
    session = _open(
        model,
        device=device,
        dtype=dtype,
        ladder=ladder,
        renormalise=renormalise,
        code=code,
        slots=slots,
        vram=vram,
        ram=ram,
        prefetch=prefetch,
        verify_reads=verify_reads,
        mirrors=mirror,
        context=context,
    )
    sampling = _sampling(session, max_new_tokens, temperature, top_p, seed, guard=guard, junk=tuple(junk))
    from runtime.answering import print_answer
    from runtime.chat import Conversation, require_tokenizer
    from runtime.chat_template import BOS
    from runtime.tokenizer import encode

    tokenizer = require_tokenizer(session)
    if raw:
        prompt_ids = encode(tokenizer, BOS + text)
    else:
        prompt_ids = Conversation(tokenizer, _chat_options(session.config, think=False, effort=None)).ask(text)
    with _told("interrupted"):
        print_answer(session, tokenizer, prompt_ids, sampling)
    _write_stats(session, stats)


@app.command()
def bench(
    model: Model = "demo",
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
    device: Device = None,
    dtype: Dtype = None,
    ladder: Annotated[
        str | None, typer.Option("--ladder", help="As in chat; default: auto for prompts, exact for a replay.")
    ] = None,
    renormalise: Renormalise = True,
    code: Code = None,
    slots: Slots = None,
    vram: Vram = None,
    ram: Ram = None,
    prefetch: Annotated[
        str | None, typer.Option("--prefetch", help="Prompts: as in chat. A replay has --variants.")
    ] = None,
    verify_reads: VerifyReads = False,
    mirror: Mirrors = [],  # noqa: B006 - typer copies it
    context: Context = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Prompts: of each one's first run (0).")] = None,
    guard: GuardOption = True,
    junk: Junk = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Prompts: write each run's transcript, and the JSON, to this directory."),
    ] = None,
) -> None:
    """Measure speed: of answers to a set of prompts, or of ways to prefetch on one sequence. A table, then one JSON document as the last line."""
    store: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "renormalise": renormalise,
        "code": code,
        "slots": slots,
        "vram": vram,
        "ram": ram,
        "verify_reads": verify_reads,
        "mirrors": mirror,
        "context": context,
    }
    if force_tokens is not None:
        of_prompts: dict[str, object] = {
            "--prompts": prompts,
            "--prefetch": prefetch,
            "--temperature": temperature,
            "--top-p": top_p,
        }
        of_prompts |= {"--seed": seed, "--no-guard": None if guard else True, "--junk": junk or None, "--out": out}
        _refuse_options("--force-tokens", of_prompts)
        names = "off,hash,predictor" if variants is None else variants
        lengths = (5 if repeat is None else repeat, tokens or 128, prompt_tokens or 32)
        _bench_replay(model, force_tokens, names, lengths, ladder="exact" if ladder is None else ladder, **store)
        return
    _refuse_options("--prompts", {"--variants": variants, "--tokens": tokens, "--prompt-tokens": prompt_tokens})
    from runtime.bench_prompts import LEAST_REPEAT, SHIPPED, read_prompts

    repeat = LEAST_REPEAT if repeat is None else repeat
    if repeat < LEAST_REPEAT:
        raise typer.BadParameter(f"--repeat {repeat}: answers differ from run to run, expected at least {LEAST_REPEAT}")
    chosen = read_prompts(prompts or SHIPPED)
    ladder, prefetch = ("auto" if choice is None else choice for choice in (ladder, prefetch))
    session = _open(model, ladder=ladder, prefetch=prefetch, **store)
    # The length is each prompt's own.
    sampling = _sampling(session, 1, temperature, top_p, seed or 0, guard=guard, junk=tuple(junk))
    _bench_prompts(session, chosen, sampling, repeat, out)


def _bench_prompts(
    session: Session, prompts: list[BenchPrompt], sampling: Sampling, repeat: int, out: Path | None
) -> None:
    from dataclasses import asdict

    from tqdm import tqdm

    from kernels.measurement import document
    from runtime.bench_prompts import RESULT, PromptRun, results, run_prompts, save_transcript, table

    drawn = asdict(sampling)
    del drawn["max_new_tokens"]  # each prompt has its own
    asked = {"set": [asdict(prompt) for prompt in prompts], "repeat": repeat, "sampling": drawn}
    asked |= {"experts": session.experts_line}
    runs, planned = list[PromptRun](), repeat * len(prompts)
    measured = run_prompts(session, prompts, sampling, repeat, _chat_options(session.config, think=False, effort=None))
    with _told("interrupted; --out has the runs that have ended" if out else "interrupted"):
        for run in tqdm(measured, desc="bench", total=planned, unit="run", disable=None):
            runs.append(run)
            found = results(runs) | asked | {"planned_runs": planned}
            measurement = document("answers to a set of prompts", "runtime.cli", found, session.directory)
            if out is not None:
                save_transcript(out, run)
                _save(measurement, out / RESULT)  # after each one: transcripts and numbers are of the same runs
    typer.echo("\n".join(table(found)))
    _print_measurement(measurement, None)


def _bench_replay(model: str, force_tokens: Path, variants: str, lengths: tuple[int, int, int], **options: Any) -> None:
    from runtime.bench_variants import parse_variants, prefetch_for

    names = parse_variants(variants)
    session = _open(model, prefetch=prefetch_for(names), **options)
    from tqdm import tqdm

    from kernels.measurement import document
    from runtime.bench import BenchSettings, forced_ids, run_bench
    from runtime.bench_report import results, table

    settings = BenchSettings(names, *lengths)
    measured = run_bench(session, forced_ids(force_tokens, session), settings)
    runs = list(tqdm(measured, desc="bench", total=settings.repeat * len(names), unit="run", disable=None))
    found = results(runs, settings) | {"experts": session.experts_line}
    typer.echo("\n".join(table(found)))
    _print_measurement(document(f"{variants} on forced tokens", "runtime.cli", found, session.directory), None)


def _refuse_options(way: str, options: dict[str, object]) -> None:
    """Raises BadParameter if one of the options, which mean nothing in this way to run, is given."""
    for name, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"{name} means nothing with {way}")


@app.command()
def tune(
    text: Annotated[
        list[Path], typer.Option("--text", help="Held-out text: a file, one document; or .jsonl, one a line.")
    ],
    model: Model = "demo",
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
    device: Device = None,
    dtype: Dtype = None,
    vram: Vram = None,
    ram: Ram = None,
    context: Context = None,
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
    with _told(RESUMES):
        trials = tune_model(opened, plan, settings, max_ppl_ratio, lambda line: typer.echo(line, err=True))
    found = results(trials, max_ppl_ratio)
    typer.echo("\n".join(table(found)))
    measurement = document("ladders, pool shares and prefetch", "runtime.cli", found, opened.directory)
    path = save(opened, trials, max_ppl_ratio, settings, measurement["machine"])
    typer.echo(f"{path}: written; chat and generate use it", err=True)
    _print_measurement(measurement, None)


@app.command("eval")
def evaluate(
    model: Model = "demo",
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
    device: Device = None,
    dtype: Dtype = None,
    renormalise: Renormalise = True,
    code: Code = None,
    slots: Slots = None,
    vram: Vram = None,
    ram: Ram = None,
    context: Context = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random residency.")] = 0,
) -> None:
    """Measure what a ladder costs against the exact model on held-out text. Prints a table, then one JSON document as the last line."""
    _check_out(out, [*text, *(path for path in (vectors, speeds, prompts) if path is not None)])
    if vectors is not None:
        others: dict[str, object] = {"--text": text or None, "--residency": residency or None, "--sweep": sweep or None}
        others |= {"--tokens": tokens, "--document-tokens": document_tokens, "--speeds": speeds, "--prompts": prompts}
        _refuse_options("--vectors", others | {"--speed-prompt": speed_prompt, "--seed": seed or None})
        pools = {"code": code, "slots": slots, "vram": vram, "ram": ram, "context": context}
        of_model = {"device": device, "dtype": dtype, "renormalise": renormalise}
        _print_vectors(model, vectors, out, ladder, of_model | pools)
        return
    of_sweep: dict[str, object] = {"--speeds": speeds, "--speed-prompt": speed_prompt, "--prompts": prompts}
    _check_sweep_options(sweep, of_sweep)
    if not text or not (ladder or sweep):
        raise typer.BadParameter("expected --text FILE with --ladder or --sweep, or --vectors FILE")
    if sweep and (ladder or residency or code or not renormalise):
        raise typer.BadParameter("--sweep chooses --ladder, --residency, --code and --renormalise itself")
    from kernels.measurement import document
    from runtime.devices import compute_device
    from runtime.eval_rows import Row, read_model, sweep_rows
    from runtime.sweep import EvalSettings, run
    from runtime.sweep_report import PICTURE, draw, read_speeds, table, with_speeds
    from runtime.sweep_speed import measure_speeds

    opened, warn = read_model(model), partial(typer.echo, err=True)
    pairs = [(one, form) for one in ladder for form in residency or ["none"]]
    rows = sweep_rows(opened) if sweep else [Row(code or opened.code, one, renormalise, form) for one, form in pairs]
    known = {} if speeds is None else read_speeds(speeds, rows)
    timing = None if speed_prompt is None else _speed_settings(opened, speed_prompt, prompts)
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
    answers: dict[str, Any] = {}
    with _told(RESUMES if out else "interrupted; with --out what is finished would be kept"):
        results = run(opened, settings, rows, warn)
        if timing is not None:
            known, answers = measure_speeds(opened, settings, rows, timing, warn)
    typer.echo("\n".join(table(results, known)))
    if sweep and out is not None:
        typer.echo(draw(results, known, out.with_name(PICTURE)))
    found = with_speeds(results, known) if known else results
    measurement = document("ladders against the exact model", "runtime.cli", found, opened.directory)
    _print_measurement(measurement | ({"answers": answers} if answers else {}), out)


def _check_sweep_options(sweep: bool, given: dict[str, object]) -> None:
    """Raises BadParameter if options about speed are given without a sweep, or do not go together."""
    if not sweep:
        _refuse_options("rows without --sweep", given)
    if given["--prompts"] is not None and given["--speed-prompt"] is None:
        raise typer.BadParameter("--prompts needs --speed-prompt")
    if given["--speeds"] is not None and given["--speed-prompt"] is not None:
        raise typer.BadParameter("give --speeds or --speed-prompt, not both")


def _speed_settings(opened: Measured, name: str, prompts: Path | None) -> SpeedSettings:
    from runtime.answering import Sampling
    from runtime.bench_prompts import SHIPPED, read_prompts
    from runtime.sampler import SamplingDefaults
    from runtime.sweep_speed import SpeedSettings, choose_prompt

    prompt = choose_prompt(read_prompts(prompts or SHIPPED), name)
    defaults = SamplingDefaults.from_directory(opened.directory)
    sampling = Sampling(prompt.tokens, defaults.temperature, defaults.top_p, seed=0)
    return SpeedSettings(prompt, sampling, _chat_options(opened.config, think=False, effort=None))


def _print_vectors(model: str, path: Path, out: Path | None, ladders: list[str], options: dict[str, Any]) -> None:
    if len(ladders) > 1:
        raise typer.BadParameter("--vectors takes one --ladder at most")
    from kernels.measurement import document
    from runtime.vectors import compare, lines, read_vectors, reader_of

    vectors = read_vectors(path, reader_of(model, options["context"]))  # before a model that takes minutes to open
    session = _open(model, ladder=ladders[0] if ladders else "exact", **options)
    with _told("interrupted"):
        found = [compare(session, vector) for vector in vectors]
    typer.echo("\n".join(lines(found)))
    _print_measurement(document("published vectors", "runtime.cli", found, session.directory), out)


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


@contextmanager
def _told(line: str) -> Iterator[None]:
    """Within: Ctrl-C ends the program with this line."""
    try:
        yield
    except KeyboardInterrupt:
        raise StrawError(line) from None


def _save(measurement: dict[str, Any], path: Path) -> None:
    from runtime.files import atomic_file

    with atomic_file(path) as file:
        file.write(json.dumps(_with_command(measurement), indent=1).encode() + b"\n")


def _print_measurement(measurement: dict[str, Any], out: Path | None) -> None:
    """The document as the last line, and in a file if one is named."""
    if out is not None:
        _save(measurement, out)
    typer.echo(json.dumps(_with_command(measurement)))


def _with_command(measurement: dict[str, Any]) -> dict[str, Any]:
    return measurement | {"command": shlex.join(["runtime", *sys.argv[1:]])}


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str | None:
    from runtime.prompt_file import checked_prompt, read_prompt

    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        return read_prompt(prompt_file)
    return None if prompt is None else checked_prompt(prompt)


def _system_text(text: str) -> str:
    from runtime.prompt_file import checked_prompt

    return checked_prompt(text, "--system") if text else ""


def _open(model: str, *, device: str | None, **options: Any) -> Session:
    from runtime.devices import compute_device
    from runtime.opening import open_model

    device, taken = compute_device(device), _taken_line(model, **options)
    session = open_model(model, device=device, warn=lambda line: typer.echo(line, err=True), **options)
    typer.echo(f"{model} on {device}, {session.context:,} tokens of context, {session.experts_line}", err=True)
    if taken is not None:
        typer.echo(taken, err=True)
    return session


def _taken_line(
    model: str,
    *,
    ladder: str,
    prefetch: str = "off",
    slots: str | None = None,
    code: str | None = None,
    vram: str | None = None,
    ram: str | None = None,
    **_others: object,
) -> str | None:
    """What comes from the model directory's runtime.toml, if anything does; StrawError if it was measured on something else."""
    from runtime.demo import DEMO_NAME, prepared_demo
    from runtime.ladder import EXACT
    from runtime.store.tuned import AUTO, TUNED, check_measured_on, read_tuned, taken_line

    directory = prepared_demo() if model == DEMO_NAME else Path(model)
    has_no_shares = slots is not None or ladder == EXACT
    if not directory.is_dir() or (has_no_shares and AUTO not in (ladder, prefetch)):
        return None
    tuned = read_tuned(directory)
    if code is not None:
        check_measured_on(directory / TUNED, tuned.measured, code=code)
    return taken_line(tuned, ladder=ladder, prefetch=prefetch, has_slots=has_no_shares, vram=vram, ram=ram)


def _sampling(
    session: Session, max_new_tokens: int, temperature: float | None, top_p: float | None, seed: int, **options: Any
) -> Sampling:
    """The user's choices, the model directory's where there are none."""
    from runtime.answering import Sampling
    from runtime.sampler import Sampler, SamplingDefaults

    defaults = SamplingDefaults.from_directory(session.directory)
    sampling = Sampling(
        max_new_tokens,
        defaults.temperature if temperature is None else temperature,
        defaults.top_p if top_p is None else top_p,
        seed,
        **options,
    )
    try:
        Sampler(sampling.temperature, sampling.top_p, sampling.seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return sampling


def _chat_options(config: ModelConfig, think: bool, effort: str | None) -> ChatOptions:
    from runtime.chat_template import ChatOptions, release_of

    if effort is not None and not think:
        raise typer.BadParameter("--effort needs --think")
    drafts = len(config.compress_ratios) - config.num_hidden_layers
    try:
        return ChatOptions(thinking=think, effort=effort, release=release_of(drafts))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _write_stats(session: Session, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(session.stats(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StrawError(
            f"{path}: cannot be written ({error.strerror}), expected a file to write; name another --stats"
        ) from None


def main(arguments: list[str] | None = None) -> None:
    """Runs `runtime`; ends by SystemExit."""
    run_cli(app, arguments)
