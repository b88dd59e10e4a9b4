"""`runtime bench --prompts`: a set of prompts, each answered several times as in chat, and the speed of those answers that are sound.

Inside the timed window of a run: from its first generated token to its last one, with sampling, guard and detokenizing. The
prefill stands apart, as the time to the first token; opening the model is outside. Runs are interleaved over the prompts and
the tiers stay as the run before has left them, as in a conversation; only the very first run finds them empty.

Every run keeps its transcript, what was withdrawn included. A run that `speed.invalid_reason` objects to has no speed, and no
time from which to work one out; it is counted, shown with its reason, and part of no median.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runtime.answering import AnswerStream, Sampling
from runtime.chat import Conversation, require_tokenizer
from runtime.chat_template import ChatOptions
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.files import atomic_file
from runtime.prompt_file import checked_prompt

SHIPPED = Path(__file__).parents[1] / "artifacts" / "prompts.json"
RESULT = "bench.json"  # beside the transcripts
LEAST_REPEAT = 3  # the article saw one artifact, then 192, from one configuration
WINDOW = (
    "first generated token to last one, sampling and guard included; prefill apart; tiers as the run before left them"
)
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One user turn, and how many tokens its answer may have."""

    name: str
    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True)
class PromptRun:
    """One answer. `tokens` are those kept; `decode_seconds` is None where `invalid` says why no speed may be said."""

    prompt: str
    repeat: int  # from 0
    seed: int
    prompt_tokens: int
    first_token_seconds: float  # 0 where no token came
    tokens: int
    decode_seconds: float | None
    invalid: str | None
    findings: int
    rollbacks: int
    withdrawn_tokens: int
    transcript: str

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first one; None if the run is invalid."""
        return None if self.decode_seconds is None else (self.tokens - 1) / self.decode_seconds


def read_prompts(path: Path) -> list[BenchPrompt]:
    """The prompts of a .json list of {"name", "prompt", "tokens"}.

    Raises:
        StrawError: The file cannot be read, is no such list, or names a prompt twice.
    """
    try:
        prompts = [_prompt_of(number, item) for number, item in enumerate(_list(json.loads(path.read_bytes())))]
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise StrawError(
            f'{path}: not a set of prompts ({reason}), expected a .json list of objects with "name", "prompt" and "tokens"; correct it or name another --prompts'
        ) from None
    for number, prompt in enumerate(prompts):
        _check(f"{path}: prompt {number}", prompt, {other.name for other in prompts[:number]})
    if not prompts:
        raise StrawError(f"{path}: no prompt in it, expected one or more; name another --prompts")
    return prompts


def run_prompts(
    session: Session, prompts: Sequence[BenchPrompt], sampling: Sampling, repeat: int, options: ChatOptions
) -> Iterator[PromptRun]:
    """Every run as it ends: A B C A B C …, run i of a prompt with the seed `sampling.seed` + i.

    Args:
        session: Of a model with a tokenizer.
        prompts: Answered one by one, each as the first turn of a conversation of its own.
        sampling: Of every answer, but for seed and length.
        repeat: Runs of each prompt.
        options: How turns are encoded.

    Raises:
        StrawError: A prompt and its answer do not fit into the context, before the first run.
    """
    tokenizer = require_tokenizer(session)
    asked = [(prompt, Conversation(tokenizer, options).ask(prompt.prompt)) for prompt in prompts]
    _check_context(session, asked)
    for number in range(repeat):
        for prompt, prompt_ids in asked:
            own = replace(sampling, max_new_tokens=prompt.tokens, seed=sampling.seed + number)
            yield _run(session, prompt.name, number, prompt_ids, own)


def results(runs: Sequence[PromptRun]) -> dict[str, Any]:
    """What is written down: every run with its transcript, each prompt's median over its valid runs, and the whole.

    `slowest` is the slowest prompt among those that have a valid run; None where none has.
    """
    prompts = [
        _prompt([run for run in runs if run.prompt == name]) for name in dict.fromkeys(run.prompt for run in runs)
    ]
    timed = [row for row in prompts if row["valid_runs"]]
    slowest = min(timed, key=lambda row: row["tokens_per_second"], default=None)
    return {
        "window": WINDOW,
        "runs": [asdict(run) | {"tokens_per_second": run.tokens_per_second} for run in runs],
        "prompts": prompts,
        "slowest": slowest and slowest["prompt"],
        "slowest_tokens_per_second": slowest and slowest["tokens_per_second"],
        "median_tokens_per_second": statistics.median(row["tokens_per_second"] for row in timed) if timed else None,
        "invalid_runs": sum(run.invalid is not None for run in runs),
        "findings": sum(run.findings for run in runs),
        "rollbacks": sum(run.rollbacks for run in runs),
        "withdrawn_tokens": sum(run.withdrawn_tokens for run in runs),
    }


def table(document: dict[str, Any]) -> list[str]:
    """`results` as lines for the user: prompts, then what is wrong with each invalid run, then the whole."""
    lines = [
        f"{'prompt':12} {'valid':>5} {'tokens/s':>9} {'range':>17} {'first token s':>14}  tokens; junk found, by run"
    ]
    lines += [_prompt_line(row) for row in document["prompts"]]
    lines += [
        f"{run['prompt']}, run {run['repeat'] + 1}: invalid: {run['invalid']}"
        for run in document["runs"]
        if run["invalid"] is not None
    ]
    return [*lines, _summary_line(document)]


def save_transcript(directory: Path, run: PromptRun) -> None:
    """Writes PROMPT-RUN.txt, the runs counted from 1; errors as in `files.atomic_file`."""
    with atomic_file(directory / f"{run.prompt}-{run.repeat + 1}.txt") as file:
        file.write(run.transcript.encode(errors="replace"))


def _run(session: Session, name: str, number: int, prompt_ids: list[int], sampling: Sampling) -> PromptRun:
    session.reset()  # the prefill of a prompt is not saved by the run before
    text = io.StringIO()
    stream = AnswerStream(session, require_tokenizer(session), sampling, text, text)
    stream.run(prompt_ids)
    timing, invalid = stream.timing, stream.invalid_reason()
    if invalid is None and len(stream.answer_ids) < 2:
        invalid = f"{len(stream.answer_ids)} token, too few for a speed"
    first = timing.first_token_seconds or 0.0
    return PromptRun(
        prompt=name,
        repeat=number,
        seed=sampling.seed,
        prompt_tokens=len(prompt_ids),
        first_token_seconds=first,
        tokens=len(stream.answer_ids),
        decode_seconds=None if invalid else timing.last_token_seconds - first,
        invalid=invalid,
        findings=len(stream.findings),
        rollbacks=stream.counts.rollbacks,
        withdrawn_tokens=stream.counts.withdrawn_tokens,
        transcript=text.getvalue(),
    )


def _prompt(runs: Sequence[PromptRun]) -> dict[str, Any]:
    valid = [run for run in runs if run.invalid is None]
    speeds = [run.tokens_per_second for run in valid if run.tokens_per_second is not None]
    return {
        "prompt": runs[0].prompt,
        "prompt_tokens": runs[0].prompt_tokens,
        "num_runs": len(runs),
        "valid_runs": len(valid),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "range": [min(speeds), max(speeds)] if speeds else None,
        "first_token_seconds": statistics.median(run.first_token_seconds for run in valid) if valid else None,
        "tokens": [run.tokens for run in runs],
        "findings": [run.findings for run in runs],
    }


def _prompt_line(row: dict[str, Any]) -> str:
    speed, between, first = "invalid", "", ""
    if row["valid_runs"]:
        speed, between = f"{row['tokens_per_second']:.2f}", "{:.2f} … {:.2f}".format(*row["range"])
        first = f"{row['first_token_seconds']:.2f}"
    counts = "; ".join(" ".join(f"{count:,}" for count in row[name]) for name in ("tokens", "findings"))
    valid = f"{row['valid_runs']}/{row['num_runs']}"
    return f"{row['prompt']:12} {valid:>5} {speed:>9} {between:>17} {first:>14}  {counts}"


def _summary_line(document: dict[str, Any]) -> str:
    num_runs = len(document["runs"])
    counts = f"{document['invalid_runs']} of {num_runs} runs invalid, junk found {document['findings']} times, {document['rollbacks']} rollbacks of {document['withdrawn_tokens']:,} tokens"
    if document["slowest"] is None:
        return f"no speed: no run is valid; {counts}"
    untimed = sum(not row["valid_runs"] for row in document["prompts"])
    note = f" ({untimed} prompts without a valid run are not among them)" if untimed else ""
    return f"slowest prompt: {document['slowest']}, {document['slowest_tokens_per_second']:.2f} tokens/s; median of the prompts {document['median_tokens_per_second']:.2f}{note}; {counts}"


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise ValueError(f"it holds {_json_name(found)}")
    return found


def _json_name(value: Any) -> str:
    """In JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _prompt_of(number: int, item: Any) -> BenchPrompt:
    if not isinstance(item, dict) or item.keys() != {"name", "prompt", "tokens"}:
        found = f"has {', '.join(map(str, item))}" if isinstance(item, dict) else f"is {_json_name(item)}"
        raise ValueError(f"prompt {number} {found[:60]}")
    return BenchPrompt(**item)


def _check(where: str, prompt: BenchPrompt, names: set[str]) -> None:
    """Raises StrawError if a field is not what it must be; names become file names."""
    if not isinstance(prompt.name, str) or not NAME.fullmatch(prompt.name) or prompt.name in names:
        raise StrawError(
            f"{where}: name is {prompt.name!r}, expected small letters, digits, - and _, each name once; correct it"
        )
    if type(prompt.tokens) is not int or prompt.tokens < 2:
        raise StrawError(f"{where}: tokens is {prompt.tokens!r}, expected a number of at least 2; correct it")
    if not isinstance(prompt.prompt, str):
        raise StrawError(f"{where}: prompt is {prompt.prompt!r}, expected text; correct it")
    checked_prompt(prompt.prompt, where)


def _check_context(session: Session, asked: Sequence[tuple[BenchPrompt, list[int]]]) -> None:
    longest, prompt_ids = max(asked, key=lambda pair: len(pair[1]) + pair[0].tokens)
    needed = len(prompt_ids) + longest.tokens
    if needed > session.context:
        raise StrawError(
            f"prompt {longest.name}: {len(prompt_ids):,} tokens and {longest.tokens:,} for its answer, the context has {session.context:,}, expected at least {needed:,}; give a larger --context or other --prompts"
        )
