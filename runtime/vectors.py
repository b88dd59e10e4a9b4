"""Published vectors, greedy continuations with the likeliest tokens' log-probabilities, beside what the model here says.

A file holds one JSON record or a list of them, as https://github.com/antirez/ds4 publishes them for V4-Flash
(tests/test-vectors/official): {"id", "prompt": a user turn, "steps": [{"token": {"bytes": [...]}, "top_logprobs":
[{"token": {"bytes": [...]}, "logprob": x}, ...]}, ...]}. Beside that a record may give "prompt_ids", token ids from position 0,
in the place of "prompt", and any token as its id. Owns the reading and the comparison; runs no ladder of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from runtime.chat import Conversation
from runtime.chat_template import ChatOptions
from runtime.demo import DEMO_NAME, prepared_demo
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.evaluation import forward_all
from runtime.opening import DEFAULT_CONTEXT, open_source
from runtime.tokenizer import load_tokenizer, missing_tokenizer, token_bytes

LIKELY = 0.01  # of probability, as published: what lies below differs widely between sound programs
NOT_GIVEN = -9999.0  # stands for the log-probability of a token that the API calls too unlikely to say


@dataclass(frozen=True, slots=True)
class Vector:
    """One prompt with its continuation, and at each of its tokens the published log-probabilities by token id."""

    name: str
    prompt_ids: list[int]
    continuation_ids: list[int]
    logprobs: list[dict[int, float]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the model is from one vector, its continuation forced; differences are of log-probabilities, in nats."""

    name: str
    tokens: int
    agreeing: int  # continuation tokens that are the likeliest here too
    first_other: int | None  # the position in the continuation of the first that is not
    compared: int  # log-probabilities
    largest_difference: float
    largest_likely_difference: float  # of those published at LIKELY or more
    mean_difference: float


class Reader(NamedTuple):
    """What must be known of a model to take vectors, without its weights."""

    directory: Path
    tokenizer: Tokenizer | None
    vocab_size: int
    context: int


def reader_of(model: str, context: int | None) -> Reader:
    """The model directory, released checkpoint or "demo"; `context` as of `open_model`.

    Raises:
        StrawError: It is neither, or damaged.
    """
    directory = prepared_demo() if model == DEMO_NAME else Path(model)
    source = open_source(directory)
    source.close()
    longest = min(DEFAULT_CONTEXT, source.config.max_position_embeddings) if context is None else context
    return Reader(directory, load_tokenizer(directory), source.config.vocab_size, longest)


def read_vectors(path: Path, model: Reader) -> list[Vector]:
    """The vectors of a file, in the model's token ids.

    Raises:
        StrawError: The file cannot be read, is damaged, has a token that the model has not, or is longer than the context.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise _unusable(path, reason or str(error)) from None
    records = found if isinstance(found, list) else [found]
    if not records:
        raise _unusable(path, "no record in it")
    ids = {} if model.tokenizer is None else {own: number for number, own in enumerate(token_bytes(model.tokenizer))}
    return [_vector(path, number, record, model, ids) for number, record in enumerate(records)]


def compare(session: Session, vector: Vector) -> dict[str, Any]:
    """A Comparison's numbers by name.

    Raises:
        ContextFullError: The vector is longer than the session's context.
    """
    ids = vector.prompt_ids + vector.continuation_ids
    hidden = forward_all(session, ids[:-1])[len(vector.prompt_ids) - 1 :]
    logprobs = session._model_logits(hidden.to(session._state.position.device)).double().log_softmax(-1).cpu()
    agrees = logprobs.argmax(-1) == torch.tensor(vector.continuation_ids)
    pairs = [
        (float(row[token_id]), published)
        for row, step in zip(logprobs, vector.logprobs, strict=True)
        for token_id, published in step.items()
        if published > NOT_GIVEN
    ]
    gaps = [abs(here - published) for here, published in pairs]
    likely = [gap for gap, (_, published) in zip(gaps, pairs, strict=True) if published >= math.log(LIKELY)]
    comparison = Comparison(
        name=vector.name,
        tokens=len(agrees),
        agreeing=int(agrees.sum()),
        first_other=None if agrees.all() else int(agrees.int().argmin()),
        compared=len(gaps),
        largest_difference=max(gaps, default=0.0),
        largest_likely_difference=max(likely, default=0.0),
        mean_difference=sum(gaps) / len(gaps) if gaps else 0.0,
    )
    return asdict(comparison)


def lines(comparisons: Sequence[Mapping[str, Any]]) -> list[str]:
    """The comparisons for people, and their sum."""
    text = []
    for one in comparisons:
        other = "" if one["first_other"] is None else f", first other token at {one['first_other']}"
        text.append(
            f"{one['name']}: {one['agreeing']} of {one['tokens']} tokens agree{other}; log-probabilities differ by at most"
            f" {one['largest_difference']:.4f}, by {one['largest_likely_difference']:.4f} where published at {LIKELY:.0%} or more"
        )
    agreeing, tokens = (sum(one[name] for one in comparisons) for name in ("agreeing", "tokens"))
    largest = max(one["largest_likely_difference"] for one in comparisons)
    return [*text, f"agreement {agreeing / tokens:.1%} of {tokens} tokens, largest difference {largest:.4f}"]


def _vector(path: Path, number: int, record: Any, model: Reader, ids: Mapping[bytes, int]) -> Vector:
    try:
        name, steps = str(record.get("id", number)), record["steps"]
        prompt_ids = _prompt_ids(record, model)
        continuation = [_token_id(step["token"], model, ids) for step in steps]
        logprobs = [
            {_token_id(one["token"], model, ids): _logprob(one["logprob"]) for one in step.get("top_logprobs", [])}
            for step in steps
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _unusable(path, f"record {number}: {what}") from None
    if not prompt_ids or not continuation:
        raise _unusable(path, f"record {number}: no prompt or no step")
    num_inputs = len(prompt_ids) + len(continuation) - 1
    if num_inputs > model.context:
        raise StrawError(
            f"{path}: record {number} ({name}) takes {num_inputs:,} tokens, the context has {model.context:,}, expected no more; give a larger --context or leave it out"
        )
    return Vector(name, prompt_ids, continuation, logprobs)


def _prompt_ids(record: Mapping[str, Any], model: Reader) -> list[int]:
    if "prompt_ids" in record:
        return [_checked_id(token_id, model) for token_id in record["prompt_ids"]]
    prompt = record["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"prompt {_short(prompt)}, expected text that is not empty")
    if model.tokenizer is None:
        raise missing_tokenizer(model.directory)
    return Conversation(model.tokenizer, ChatOptions()).ask(prompt)


def _logprob(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"logprob {_short(value)}, expected a finite number")
    return float(value)


def _token_id(token: Any, model: Reader, ids: Mapping[bytes, int]) -> int:
    """The id of a token that is given as one, or as {"bytes": [...]}."""
    if not isinstance(token, Mapping):
        return _checked_id(token, model)
    if not isinstance(token["bytes"], list):  # bytes(n) would be n zeros
        raise ValueError(f"bytes {_short(token['bytes'])}, expected a list of numbers below 256")
    spelled = bytes(token["bytes"])
    if not spelled or spelled not in ids:
        raise ValueError(f"token {spelled!r} is not in the model's vocabulary")
    return ids[spelled]


def _checked_id(token_id: Any, model: Reader) -> int:
    if type(token_id) is not int or not 0 <= token_id < model.vocab_size:
        raise ValueError(f"token id {_short(token_id)}, expected one below {model.vocab_size:,}")
    return token_id


def _short(value: object) -> str:
    return repr(value)[:20]


def _unusable(path: Path, reason: str) -> StrawError:
    line = " ".join(reason.split())
    return StrawError(
        f'{path}: cannot be used as vectors ({line}), expected {{"prompt" or "prompt_ids", "steps": [{{"token", "top_logprobs"}}]}}; correct it or name another --vectors'
    )
