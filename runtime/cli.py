"""The command line `runtime`: the app, and the commands that answer. Parses, opens a session, calls one function, prints.

The commands that measure have a file each, `cli_bench`, `cli_tune` and `cli_eval`; they are joined to the app here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime import cli_options as option
from runtime.cli_bench import bench
from runtime.cli_eval import evaluate
from runtime.cli_output import told_at_interrupt
from runtime.cli_session import OpenOptions, chat_options, open_session, sampling_for
from runtime.cli_tune import tune
from runtime.console import run_cli
from runtime.errors import StrawError

if TYPE_CHECKING:
    from runtime.engine import Session

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def runtime() -> None:
    """Run a DeepSeek-V4 model: model directory in, tokens out."""


@app.command()
def chat(
    model: option.Model = "demo",
    prompt: option.Prompt = None,
    prompt_file: option.PromptFile = None,
    system: Annotated[str, typer.Option("--system", help="System text before the first turn.")] = "",
    think: Annotated[bool, typer.Option("--think", help="Thinking mode: reasoning, then </think>, then text.")] = False,
    effort: Annotated[str | None, typer.Option("--effort", help="low, high or max, as the release has.")] = None,
    device: option.Device = None,
    dtype: option.Dtype = None,
    ladder: option.Ladder = "auto",
    renormalise: option.Renormalise = True,
    code: option.Code = None,
    slots: option.Slots = None,
    vram: option.Vram = None,
    ram: option.Ram = None,
    prefetch: option.Prefetch = "auto",
    verify_reads: option.VerifyReads = False,
    mirror: option.Mirrors = [],  # noqa: B006 - typer copies it
    context: option.Context = None,
    max_new_tokens: option.MaxNewTokens = 1024,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    seed: option.Seed = 0,
    guard: option.Guard = True,
    junk: option.Junk = [],  # noqa: B006 - typer copies it
    stats: option.Stats = None,
) -> None:
    """Talk with the model: streaming answers, several turns. With --prompt, one answer."""
    text = _prompt_text(prompt, prompt_file)
    system = _system_text(system)
    options = OpenOptions(
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
    session = open_session(model, options)
    sampling = sampling_for(session, max_new_tokens, temperature, top_p, seed, guard=guard, junk=junk, thinking=think)
    from runtime.chat import Conversation, answer, converse, require_tokenizer

    conversation = Conversation(require_tokenizer(session), chat_options(session.config, think, effort), system)
    if text is None:
        converse(session, conversation, sampling)
    else:
        answer(session, conversation, text, sampling)
    _write_stats(session, stats)


@app.command()
def generate(
    model: option.Model = "demo",
    prompt: option.Prompt = None,
    prompt_file: option.PromptFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text itself, after BOS, without turns.")] = False,
    device: option.Device = None,
    dtype: option.Dtype = None,
    ladder: option.Ladder = "auto",
    renormalise: option.Renormalise = True,
    code: option.Code = None,
    slots: option.Slots = None,
    vram: option.Vram = None,
    ram: option.Ram = None,
    prefetch: option.Prefetch = "auto",
    verify_reads: option.VerifyReads = False,
    mirror: option.Mirrors = [],  # noqa: B006 - typer copies it
    context: option.Context = None,
    max_new_tokens: option.MaxNewTokens = 256,
    temperature: option.Temperature = None,
    top_p: option.TopP = None,
    seed: option.Seed = 0,
    guard: option.Guard = True,
    junk: option.Junk = [],  # noqa: B006 - typer copies it
    stats: option.Stats = None,
) -> None:
    """Answer one prompt and print the text alone: as it comes at exact or with --no-guard; else whole, as the guard may withdraw some."""
    text = _prompt_text(prompt, prompt_file)
    if text is None:
        raise typer.BadParameter("expected --prompt TEXT or --prompt-file FILE")
    options = OpenOptions(
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
    session = open_session(model, options)
    sampling = sampling_for(session, max_new_tokens, temperature, top_p, seed, guard=guard, junk=junk)
    from runtime.answering import print_answer
    from runtime.chat import Conversation, require_tokenizer
    from runtime.chat_template import BOS
    from runtime.tokenizer import encode

    tokenizer = require_tokenizer(session)
    if raw:
        prompt_ids = encode(tokenizer, BOS + text)
    else:
        prompt_ids = Conversation(tokenizer, chat_options(session.config)).ask(text)
    with told_at_interrupt("interrupted"):
        print_answer(session, tokenizer, prompt_ids, sampling)
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


def _write_stats(session: Session, path: Path | None) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(session.stats(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StrawError(
            f"{path}: cannot be written ({error.strerror}), expected a file to write; name another --stats"
        ) from None


app.command()(bench)
app.command()(tune)
app.command("eval")(evaluate)


def main(arguments: list[str] | None = None) -> None:
    """Runs `runtime`; ends by SystemExit."""
    run_cli(app, arguments)
