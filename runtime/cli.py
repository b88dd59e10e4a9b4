"""The command line `runtime`: parses, opens a session, calls one function, prints. Holds no logic."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.console import run_cli
from runtime.errors import StrawError

if TYPE_CHECKING:
    from runtime.chat import Sampling
    from runtime.chat_template import ChatOptions
    from runtime.engine import Session

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help='A model directory, a released checkpoint that fits in memory, or "demo".')]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One user turn; answer it and end.")]
PromptFile = Annotated[Path | None, typer.Option("--prompt-file", help="Read the user turn from a text file.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or cuda:i; default: cuda if there is one.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16; default: float32 on the CPU.")]
Context = Annotated[int | None, typer.Option("--context", help="Tokens of the longest conversation.")]
Ladder = Annotated[
    str, typer.Option("--ladder", help="a,b or exact or mass:hi,lo; auto: exact if all experts fit, else 2,4.")
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
    str, typer.Option("--prefetch", help="off, hash or predictor: what is read before it is asked for.")
]
VerifyReads = Annotated[bool, typer.Option("--verify-reads", help="Check the CRC-32 of every slab that is read.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="0 is greedy; default: the model's generation_config.json.")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Default: the model's generation_config.json.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the sampler.")]
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
    prefetch: Prefetch = "off",
    verify_reads: VerifyReads = False,
    mirror: Mirrors = [],  # noqa: B006 - typer copies it
    context: Context = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = 0,
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
    sampling = _sampling(session, max_new_tokens, temperature, top_p, seed)
    from runtime.chat import Conversation, answer, converse, require_tokenizer

    conversation = Conversation(require_tokenizer(session), _chat_options(session, think, effort), system)
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
    prefetch: Prefetch = "off",
    verify_reads: VerifyReads = False,
    mirror: Mirrors = [],  # noqa: B006 - typer copies it
    context: Context = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = 0,
    stats: Stats = None,
) -> None:
    """Answer one prompt and print the text alone."""
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
    sampling = _sampling(session, max_new_tokens, temperature, top_p, seed)
    from runtime.chat import Conversation, require_tokenizer, stream_answer
    from runtime.chat_template import BOS
    from runtime.tokenizer import encode

    tokenizer = require_tokenizer(session)
    if raw:
        prompt_ids = encode(tokenizer, BOS + text)
    else:
        prompt_ids = Conversation(tokenizer, _chat_options(session, think=False, effort=None)).ask(text)
    for _ in stream_answer(session, prompt_ids, sampling, sys.stdout):
        pass
    _write_stats(session, stats)


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
    from runtime.engine import open_model

    device = compute_device(device)
    session = open_model(model, device=device, warn=lambda line: typer.echo(line, err=True), **options)
    typer.echo(f"{model} on {device}, {session.context:,} tokens of context, {session.experts_line}", err=True)
    return session


def _sampling(
    session: Session, max_new_tokens: int, temperature: float | None, top_p: float | None, seed: int
) -> Sampling:
    """The user's choices, the model directory's where there are none."""
    from runtime.chat import Sampling
    from runtime.sampler import Sampler, SamplingDefaults

    defaults = SamplingDefaults.from_directory(session.directory)
    sampling = Sampling(
        max_new_tokens,
        defaults.temperature if temperature is None else temperature,
        defaults.top_p if top_p is None else top_p,
        seed,
    )
    try:
        Sampler(sampling.temperature, sampling.top_p, sampling.seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return sampling


def _chat_options(session: Session, think: bool, effort: str | None) -> ChatOptions:
    from runtime.chat_template import ChatOptions, release_of

    if effort is not None and not think:
        raise typer.BadParameter("--effort needs --think")
    drafts = len(session.config.compress_ratios) - session.config.num_hidden_layers
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
