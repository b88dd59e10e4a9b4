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
from typing import Any

import torch
from tokenizers import pre_tokenizers

from runtime.chat import Conversation, require_tokenizer
from runtime.chat_template import ChatOptions
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.evaluation import forward_all

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


def read_vectors(path: Path, session: Session) -> list[Vector]:
    """The vectors of a file, in the session's token ids.

    Raises:
        StrawError: The file cannot be read, is damaged, or has a token that the model has not.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise _unusable(path, reason or str(error)) from None
    records = found if isinstance(found, list) else [found]
    if not records:
        raise _unusable(path, "no record in it")
    ids = _ids_by_bytes(session)
    return [_vector(path, number, record, session, ids) for number, record in enumerate(records)]


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


def _ids_by_bytes(session: Session) -> dict[bytes, int]:
    """The token id of each byte string; only where the session has a tokenizer."""
    if session.tokenizer is None:
        return {}
    own = session.tokenizer
    added = {token.content for token in own.get_added_tokens_decoder().values()}
    spelled = byte_of_character()
    return {
        text.encode() if text in added else bytes(spelled[char] for char in text): token_id
        for text, token_id in own.get_vocab().items()
        if text in added or all(char in spelled for char in text)
    }


def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (the table of GPT-2's tokenizer).

    Printable bytes stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    assert table.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return table


def _vector(path: Path, number: int, record: Any, session: Session, ids: Mapping[bytes, int]) -> Vector:
    try:
        name = str(record.get("id", number))
        if "prompt_ids" in record:
            prompt_ids = [_checked_id(token_id, session) for token_id in record["prompt_ids"]]
        else:
            prompt_ids = Conversation(require_tokenizer(session), ChatOptions()).ask(record["prompt"])
        steps = record["steps"]
        continuation = [_token_id(step["token"], session, ids) for step in steps]
        logprobs = [
            {_token_id(one["token"], session, ids): float(one["logprob"]) for one in step.get("top_logprobs", [])}
            for step in steps
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise _unusable(path, f"record {number}: {what}") from None
    if not prompt_ids or not continuation:
        raise _unusable(path, f"record {number}: no prompt or no step")
    return Vector(name, prompt_ids, continuation, logprobs)


def _token_id(token: Any, session: Session, ids: Mapping[bytes, int]) -> int:
    """The id of a token that is given as one, or as {"bytes": [...]}."""
    if not isinstance(token, Mapping):
        return _checked_id(token, session)
    spelled = bytes(token["bytes"])
    if spelled not in ids:
        raise ValueError(f"token {spelled!r} is not in the model's vocabulary")
    return ids[spelled]


def _checked_id(token_id: Any, session: Session) -> int:
    if type(token_id) is not int or not 0 <= token_id < session.config.vocab_size:
        raise ValueError(f"token id {str(token_id)[:20]}, expected one below {session.config.vocab_size:,}")
    return token_id


def _unusable(path: Path, reason: str) -> StrawError:
    line = " ".join(reason.split())
    return StrawError(
        f'{path}: cannot be used as vectors ({line}), expected {{"prompt" or "prompt_ids", "steps": [{{"token", "top_logprobs"}}]}}; correct it or name another --vectors'
    )
