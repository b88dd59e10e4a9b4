"""Turns of a conversation as ids, and the loop that talks, with a session that says what it is told to."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_tokenizer import build_tokenizer
from tokenizers import Tokenizer

from runtime.answering import Sampling, Timing
from runtime.chat import Conversation, answer, converse, require_tokenizer
from runtime.chat_template import ASSISTANT, BOS, EOS, THINK_END, THINK_START, USER, ChatOptions
from runtime.errors import ArtifactError, ContextFullError
from runtime.tokenizer import encode

SAMPLING = Sampling(max_new_tokens=50, temperature=0.0, top_p=1.0, seed=0, guard=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


class ScriptedSession:
    """Stands for a Session: answers with the ids of `answers` in turn, an exception among them is raised."""

    def __init__(self, tokenizer: Tokenizer, answers: list[str | BaseException]) -> None:
        self.tokenizer, self.config, self.directory = tokenizer, SimpleNamespace(eos_token_id=1), Path("model")
        self.prompts: list[list[int]] = []
        self.resets = 0
        self._answers = answers

    def generate(self, prompt_ids: Sequence[int], *arguments: object) -> Iterator[int]:
        self.prompts.append(list(prompt_ids))
        for part in self._answers.pop(0) if isinstance(self._answers[0], list) else [self._answers.pop(0)]:
            if isinstance(part, BaseException):
                raise part
            yield from encode(self.tokenizer, part)

    def reset(self) -> None:
        self.resets += 1

    def stats(self) -> dict[str, int]:
        return {"decode_tokens": 7}


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_turns_grow_by_ids(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer, ChatOptions())
    first = talk.ask("hello")
    assert _text(tokenizer, first) == f"{BOS}{USER}hello{ASSISTANT}{THINK_END}"
    wrote = encode(tokenizer, "w") + encode(tokenizer, "orld")  # not how "world" would be encoded
    assert wrote != encode(tokenizer, "world")
    talk.answered(first, [*wrote, 1], eos_token_id=1)
    second = talk.ask("hi")
    assert second[: len(first) + len(wrote) + 1] == [*first, *wrote, 1]
    assert _text(tokenizer, second) == (
        f"{BOS}{USER}hello{ASSISTANT}{THINK_END}world{EOS}{USER}hi{ASSISTANT}{THINK_END}"
    )


def test_a_stopped_answer_is_closed_with_eos(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer, ChatOptions(), system="be brief")
    first = talk.ask("hello")
    talk.answered(first, encode(tokenizer, "wor"), eos_token_id=1)
    expected = f"{BOS}be brief{USER}hello{ASSISTANT}{THINK_END}wor{EOS}{USER}go on{ASSISTANT}{THINK_END}"
    assert _text(tokenizer, talk.ask("go on")) == expected


def test_thinking_drops_earlier_reasoning(tokenizer: Tokenizer) -> None:
    talk = Conversation(tokenizer, ChatOptions(thinking=True))
    first = talk.ask("hello")
    talk.answered(first, encode(tokenizer, f"hmm{THINK_END}world{EOS}"), eos_token_id=1)
    expected = f"{BOS}{USER}hello{ASSISTANT}{THINK_END}world{EOS}{USER}hi{ASSISTANT}{THINK_START}"
    assert _text(tokenizer, talk.ask("hi")) == expected


def test_an_answer_goes_to_stdout_and_its_timing_to_stderr(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ScriptedSession(tokenizer, [f"hello 我们 🙂{EOS}"])
    answer(session, Conversation(tokenizer, ChatOptions()), "hello", SAMPLING)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "hello 我们 🙂\n"
    assert "first token after" in err
    assert "tokens/s" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("stop", "note"), [(KeyboardInterrupt(), "stopped; the conversation is kept"), (ContextFullError("full"), "full")]
)
def test_an_interrupted_answer_keeps_the_conversation(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], stop: BaseException, note: str
) -> None:
    session = ScriptedSession(tokenizer, [["hel", stop], f"world{EOS}"])  # type: ignore[list-item]
    talk = Conversation(tokenizer, ChatOptions())
    for text in ("hello", "and?"):
        answer(session, talk, text, SAMPLING)  # type: ignore[arg-type]
    assert note in capsys.readouterr().err
    assert f"{THINK_END}hel{EOS}{USER}and?" in _text(tokenizer, session.prompts[1])


def test_a_question_that_does_not_fit_is_taken_back(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    session = ScriptedSession(tokenizer, [f"a{EOS}", [ContextFullError("full")], f"b{EOS}"])  # type: ignore[list-item]
    talk = Conversation(tokenizer, ChatOptions())
    for text in ("hello", "far too long", "hi"):
        answer(session, talk, text, SAMPLING)  # type: ignore[arg-type]
    assert "far too long" not in _text(tokenizer, session.prompts[2])
    assert f"a{EOS}{USER}hi" in _text(tokenizer, session.prompts[2])


def test_the_loop_answers_and_obeys_commands(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "hello\n\n/stats\nagain\n/reset\nhello\n/what\n/exit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    session = ScriptedSession(tokenizer, [f"a{EOS}", f"b{EOS}", f"c{EOS}"])
    converse(session, Conversation(tokenizer, ChatOptions()), SAMPLING)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == "a\nb\nc\n"
    assert session.resets == 1
    assert session.prompts[2] == session.prompts[0]
    assert session.prompts[1] != session.prompts[0]
    assert '"decode_tokens": 7' in err
    assert "/what: not a command" in err


def test_timing_keeps_prompt_and_decode_apart() -> None:
    timing = Timing(started=0.0, first_token_seconds=2.0, tokens=1)
    assert timing.line(9, None) == "first token after 2.00 s (9 prompt tokens)"
    assert Timing().line(9, None) == "no token"
    longer = Timing(started=0.0, first_token_seconds=2.0, last_token_seconds=4.0, tokens=9)
    assert longer.line(9, None).endswith("decode 8 tokens in 2.00 s = 4.00 tokens/s")
    assert "tokens/s" not in longer.line(9, "a loop")


def test_text_needs_a_tokenizer(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, [])
    session.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(ArtifactError, match=r"model/tokenizer\.json: file is missing"):
        require_tokenizer(session)  # type: ignore[arg-type]
