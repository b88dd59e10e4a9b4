"""From options to what the library takes: a session that is open, how answers are drawn, which turns the release has.

Opens and reports; owns no option and runs nothing. Imported without torch, which the functions need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from runtime.answering import Sampling
    from runtime.chat_template import ChatOptions
    from runtime.config import ModelConfig
    from runtime.engine import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What a user chose about opening a model; field for field an argument of `open_model`, with its default."""

    device: str | None = None  # None is the best there is
    dtype: str | None = None
    ladder: str = "exact"
    renormalise: bool = True
    code: str | None = None
    slots: str | None = None
    vram: str | None = None
    ram: str | None = None
    prefetch: str = "off"
    verify_reads: bool = False
    mirrors: Sequence[Path] = ()
    context: int | None = None


def open_session(model: str, options: OpenOptions) -> Session:
    """A session on the model, with a line on stderr about where it runs and one about what `runtime.toml` gave.

    Raises:
        StrawError: The model, the device or an option is not usable, or `runtime.toml` was measured on something else.
    """
    from runtime.devices import compute_device
    from runtime.opening import open_model

    device, taken = compute_device(options.device), _taken_line(model, options)
    chosen = asdict(replace(options, device=device))
    session = open_model(model, warn=lambda line: typer.echo(line, err=True), **chosen)
    typer.echo(f"{model} on {device}, {session.context:,} tokens of context, {session.experts_line}", err=True)
    if taken is not None:
        typer.echo(taken, err=True)
    return session


def _taken_line(model: str, options: OpenOptions) -> str | None:
    """What comes from the model directory's runtime.toml, if anything does; StrawError if it was measured on something else."""
    from runtime.demo import DEMO_NAME, prepared_demo
    from runtime.ladder import EXACT
    from runtime.store.tuned import AUTO, TUNED, check_measured_on, read_tuned, taken_line

    ladder, prefetch = options.ladder, options.prefetch
    directory = prepared_demo() if model == DEMO_NAME else Path(model)
    has_no_shares = options.slots is not None or ladder == EXACT
    if not directory.is_dir() or (has_no_shares and AUTO not in (ladder, prefetch)):
        return None
    tuned = read_tuned(directory)
    if options.code is not None:
        check_measured_on(directory / TUNED, tuned.measured, code=options.code)
    return taken_line(
        tuned, ladder=ladder, prefetch=prefetch, has_slots=has_no_shares, vram=options.vram, ram=options.ram
    )


def sampling_for(
    session: Session,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    *,
    guard: bool,
    junk: Sequence[str],
    thinking: bool = False,
) -> Sampling:
    """The user's choices, the model directory's where there are none.

    Raises:
        BadParameter: A choice is out of its range.
    """
    from runtime.answering import Sampling
    from runtime.sampler import Sampler, SamplingDefaults

    defaults = SamplingDefaults.from_directory(session.directory)
    temperature = defaults.temperature if temperature is None else temperature
    top_p = defaults.top_p if top_p is None else top_p
    try:
        Sampler(temperature, top_p, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return Sampling(max_new_tokens, temperature, top_p, seed, thinking=thinking, guard=guard, junk=tuple(junk))


def chat_options(config: ModelConfig, think: bool = False, effort: str | None = None) -> ChatOptions:
    """Turns as this model's release writes them.

    Raises:
        BadParameter: An effort without thinking, or one that the release lacks.
    """
    from runtime.chat_template import ChatOptions, release_of

    if effort is not None and not think:
        raise typer.BadParameter("--effort needs --think")
    drafts = len(config.compress_ratios) - config.num_hidden_layers
    try:
        return ChatOptions(thinking=think, effort=effort, release=release_of(drafts))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
