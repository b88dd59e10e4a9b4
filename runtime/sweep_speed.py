"""The speed of a sweep's ladders: answers to one prompt, as in chat, on this machine's own pools; valid or not, each is kept.

Owns the measurement and what of several answers is a ladder's speed; that no rate is printed of broken text is `speed`'s and
`sweep_report`'s business. Inside the timed window: from the first generated token to the last one, guard and sampling included.
The rate of an invalid answer is kept only so that the picture can show where it was crossed out.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm import tqdm

from runtime.answering import AnswerStream, Sampling
from runtime.bench_prompts import LEAST_REPEAT, BenchPrompt
from runtime.chat import Conversation, require_tokenizer
from runtime.chat_template import ChatOptions
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.eval_rows import Model, Row
from runtime.eval_state import EvalState
from runtime.opening import open_model
from runtime.store.pools import Shares
from runtime.sweep import EvalSettings
from runtime.sweep_report import Speed, speed_names

STATE = ".speed.state.json"  # in the place of the result's suffix


@dataclass(frozen=True, slots=True)
class SpeedSettings:
    """One prompt, how its answers are drawn, and how turns are encoded."""

    prompt: BenchPrompt
    sampling: Sampling
    options: ChatOptions


def choose_prompt(prompts: Sequence[BenchPrompt], name: str) -> BenchPrompt:
    """The prompt of that name.

    Raises:
        StrawError: There is none.
    """
    for prompt in prompts:
        if prompt.name == name:
            return prompt
    raise StrawError(f"--speed-prompt {name}: expected one of {', '.join(prompt.name for prompt in prompts)}")


def measure_speeds(
    model: Model, settings: EvalSettings, rows: Sequence[Row], speed: SpeedSettings, warn: Callable[[str], None]
) -> tuple[dict[str, Speed], dict[str, Any]]:
    """The speed of each code and ladder, by `speed_names`, and the answers behind it; resumable as the sweep is.

    Raises:
        StrawError: The pools do not fit the budgets, or the prompt and its answer not the context.
    """
    own = {
        name: value for name, value in asdict(settings).items() if name in ("device", "dtype", "vram", "ram", "context")
    }
    drawn = asdict(speed)
    path = None if settings.out is None else settings.out.with_suffix(STATE)
    distinct = {speed_names(asdict(row))[0]: row for row in rows}
    with closing(EvalState(path, {"model": model.identity, **own, **drawn})) as state:
        for name, row in tqdm(distinct.items(), desc="speed", unit="ladder", disable=None):
            if state.result(name) is None:
                state.finish(name, {"answers": _answers(model, settings, row, speed, warn)})
        found = {name: (state.result(name) or {})["answers"] for name in distinct}
    return {name: speed_of_answers(answers) for name, answers in found.items()}, found


def speed_of_answers(answers: Sequence[dict[str, Any]]) -> Speed:
    """The median of the valid ones; of all, with the first one's reason, where none is valid."""
    valid = [one["tokens_per_second"] for one in answers if one["invalid"] is None]
    if valid:
        return Speed(statistics.median(valid))
    return Speed(statistics.median(one["tokens_per_second"] for one in answers), answers[0]["invalid"])


def _answers(
    model: Model, settings: EvalSettings, row: Row, speed: SpeedSettings, warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """LEAST_REPEAT answers under the row's ladder; the pools stay as the one before has left them."""
    session = open_model(
        model.directory,
        device=settings.device,
        dtype=settings.dtype,
        ladder=row.ladder,
        renormalise=row.renormalise,
        code=row.code,
        vram=settings.vram,
        ram=settings.ram,
        shares=Shares(),
        context=settings.context,
        warn=warn,
    )
    try:
        return [_answer(session, speed, number) for number in range(LEAST_REPEAT)]
    finally:
        session.close()


def _answer(session: Session, speed: SpeedSettings, number: int) -> dict[str, Any]:
    tokenizer = require_tokenizer(session)
    prompt_ids = Conversation(tokenizer, speed.options).ask(speed.prompt.prompt)
    needed = len(prompt_ids) + speed.prompt.tokens
    if needed > session.context:
        raise StrawError(
            f"--speed-prompt {speed.prompt.name}: it takes {needed:,} tokens with its answer, the context has {session.context:,}, expected no less; give a larger --context"
        )
    sampling = replace(speed.sampling, max_new_tokens=speed.prompt.tokens, seed=speed.sampling.seed + number)
    session.reset()
    stream = AnswerStream(session, tokenizer, sampling, io.StringIO(), None)
    stream.run(prompt_ids)
    timing, invalid = stream.timing, stream.invalid_reason()
    seconds = timing.last_token_seconds - (timing.first_token_seconds or 0.0)
    if timing.tokens < 2:
        invalid, seconds = invalid or f"{timing.tokens} token, too few for a speed", 1.0
    rate = max(0, timing.tokens - 1) / seconds
    return {"tokens_per_second": rate, "invalid": invalid, "tokens": timing.tokens, "pools": session.experts_line}
