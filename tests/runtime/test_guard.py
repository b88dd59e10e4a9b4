"""The guard: where it goes back to, how it comes down again, when it stops; and that going back leaves no trace."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer
from torch import Tensor

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.answering import AnswerStream, Sampling, print_answer
from runtime.chat_template import BOS, EOS
from runtime.engine import Session
from runtime.errors import ContextFullError, StrawError
from runtime.guard import (
    EASE_TOKENS,
    EXACT_TOKENS,
    KEPT_MARKS,
    MARK_TOKENS,
    Event,
    Guard,
    Reported,
    Withdrawn,
    Written,
    ease_down,
)
from runtime.junk import Finding, Kind, audit
from runtime.junk_rules import JunkRules
from runtime.ladder import Ladder, MassLadder
from runtime.sampler import Sampler
from runtime.speed import answer_rules, invalid_reason
from runtime.tokenizer import token_bytes

NUM_PICKS = 6
BASE = Ladder(2, 4)
EXACT = Ladder.exact(NUM_PICKS)
JUNK, EOS_ID, VOCAB = 7, 1, 512
RULES = JunkRules(patterns=((JUNK, JUNK, JUNK),))


class ScriptedSession:
    """Says `scripts[n]` after its n-th rollback; each token by its position in the answer. Remembers ladders and rollbacks.

    A mark keeps its logits: the token after it is the one of the script before the rollback, as with a real session.
    """

    def __init__(self, *scripts: list[int], base: Any = BASE, has_exact: bool = True) -> None:
        self.config = SimpleNamespace(num_experts_per_tok=NUM_PICKS, eos_token_id=EOS_ID)
        self.ladder, self._has_exact = base, has_exact
        self._scripts, self._rollbacks, self._length = scripts, 0, 0
        self.ladders: list[Any] = []
        self.prefilled: list[tuple[Any, list[int]]] = []
        self.rewound_to: list[int] = []

    def extend(self, prompt_ids: list[int]) -> Tensor:
        self._length = 0
        return self._logits()

    def step(self, token_id: int) -> Tensor:
        self.ladders.append(self.ladder)
        self._length += 1
        return self._logits()

    def reset(self) -> None:
        self._length = 0
        self._rollbacks += 1

    def prefill(self, prompt_ids: list[int]) -> Tensor:
        self.prefilled.append((self.ladder, list(prompt_ids)))
        return self._logits()

    def mark(self) -> int:
        return self._length

    def rewind(self, mark: int) -> None:
        self._length = mark
        self._rollbacks += 1
        self.rewound_to.append(mark)

    def can_serve(self, ladder: Ladder) -> bool:
        return self._has_exact

    def _logits(self) -> Tensor:
        """As of the script that is due, also after a rollback: the guard keeps the logits of its marks."""
        script = self._scripts[min(self._rollbacks, len(self._scripts) - 1)]
        logits = torch.zeros(VOCAB)
        logits[script[self._length] if self._length < len(script) else EOS_ID] = 1.0
        return logits


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def clean(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(20, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def watch(session: Any, limit: int = 600, rules: JunkRules = RULES) -> tuple[list[int], list[Event], Guard]:
    """What is kept, what happened beside tokens, and the guard."""
    guard, kept, events = Guard(session, rules), list[int](), list[Event]()
    for event in guard.answer([5, 6], limit, Sampler()):
        if isinstance(event, Written):
            kept.append(event.token_id)
            continue
        events.append(event)
        if isinstance(event, Withdrawn):
            assert event.num_tokens == len(kept) - event.num_kept
            del kept[event.num_kept :]
    return kept, events, guard


def test_clean_text_is_left_alone() -> None:
    session = ScriptedSession(clean(300))
    kept, events, guard = watch(session)
    assert kept == [*clean(300), EOS_ID]
    assert events == []
    assert guard.counts.findings == 0
    assert set(session.ladders) == {BASE}


def test_it_goes_back_to_the_last_mark_before_the_junk() -> None:
    text = clean(300)
    session = ScriptedSession([*text[:100], JUNK, JUNK, JUNK], text)
    kept, events, guard = watch(session)
    assert session.rewound_to == [96]
    assert kept[97:] == [*text[97:], EOS_ID]  # token 96 was drawn from the mark's own logits
    assert isinstance(events[0], Withdrawn)
    assert events[0].num_kept == 96
    assert guard.counts.withdrawn_tokens == 7
    assert guard.counts.rollbacks == 1


@pytest.mark.parametrize("began", [15, 16, 17, 32])
def test_junk_right_after_a_mark_is_mended_when_greedy(began: int) -> None:
    """The mark's logits made the junk's first token, so that mark is no way out of it."""
    text = clean(100)
    session = ScriptedSession([*text[:began], JUNK, *text[began + 1 :]], text)
    kept, events, guard = watch(session, rules=JunkRules(misplaced_ids=frozenset({JUNK})))
    assert session.rewound_to == [(began - 1) // MARK_TOKENS * MARK_TOKENS]  # strictly before
    assert kept == [*text, EOS_ID]
    assert (len(events), guard.counts.rollbacks, session.prefilled) == (1, 1, [])


@pytest.mark.parametrize("began", [0, 16])
def test_junk_where_an_answer_begins_reads_the_prompt_again_at_exact(began: int) -> None:
    """Also after a mark was given up: the only state strictly before token 0 is none."""
    text = clean(100)
    junk = [JUNK] if began == 0 else [*text[:began], JUNK]
    session = ScriptedSession([*junk, *text[len(junk) :]], text)
    kept, events, guard = watch(session, rules=JunkRules(misplaced_ids=frozenset({JUNK})))
    assert kept == [*text, EOS_ID]
    assert session.prefilled == ([(EXACT, [5, 6])] if began == 0 else [])
    assert isinstance(events[0], Withdrawn) and "going on exactly from before it" in events[0].note
    assert guard.counts.rollbacks == 1
    assert EXACT in session.ladders


def test_exact_for_a_while_then_down_step_by_step() -> None:
    text = clean(400)
    session = ScriptedSession([*text[:40], JUNK, JUNK, JUNK], text)
    watch(session)
    after = session.ladders[42:]
    runs = [(ladder, len(list(group))) for ladder, group in itertools.groupby(after)]
    steps = [Ladder(5, 5), Ladder(4, 4), Ladder(3, 4)]
    assert runs[:4] == [(EXACT, EXACT_TOKENS), *((step, EASE_TOKENS) for step in steps)]
    assert runs[4][0] == BASE
    assert len(runs) == 5
    assert session.ladder == BASE


def test_a_mass_ladder_eases_too() -> None:
    base = MassLadder(0.5, 0.9)
    ladders = ease_down(base, NUM_PICKS)
    assert ladders[:EXACT_TOKENS] == [EXACT] * EXACT_TOKENS
    assert ladders[-1] == base
    his = [ladder.hi for ladder in ladders[EXACT_TOKENS:] if isinstance(ladder, MassLadder)]
    assert his == sorted(his, reverse=True)


def test_junk_that_began_before_the_oldest_mark() -> None:
    text = clean(400)
    rules = JunkRules()  # a loop of 40, found long after it began, with few marks left
    session = ScriptedSession(clean(30) + clean(20, seed=1) * 30, text)
    guard = Guard(session, rules)  # type: ignore[arg-type]
    finding = Finding(Kind.LOOP, "a loop", began=10)
    marks: Any = [SimpleNamespace(num_tokens=n) for n in range(48, 48 + KEPT_MARKS * MARK_TOKENS, MARK_TOKENS)]
    event = guard._judge(finding, marks, 300)
    assert isinstance(event, Withdrawn)
    assert event.num_kept == 48
    assert "before the oldest state" in event.note


def test_at_exact_a_loop_is_reported_and_stays() -> None:
    session = ScriptedSession([*clean(50), JUNK, JUNK, JUNK, *clean(20, seed=2)], base=EXACT)
    kept, events, guard = watch(session)
    assert kept.count(JUNK) == 3
    assert [type(event) for event in events] == [Reported]
    assert "model's own" in events[0].note
    assert guard.counts.rollbacks == 0


def test_after_enough_tries_it_stops() -> None:
    """Each time the junk comes back once the ladder has eased down again."""
    far = EXACT_TOKENS + 4 * EASE_TOKENS
    scripts = [[*clean(40 + far * tries), JUNK, JUNK, JUNK] for tries in range(6)]
    session = ScriptedSession(*scripts)
    kept, events, guard = watch(session, limit=2000)
    assert [type(event) for event in events] == [Withdrawn] * 4 + [Reported]
    assert "stopped after 4 rollbacks" in events[-1].note
    assert kept[-1] == JUNK
    assert session.ladder == BASE
    assert guard.counts.rollbacks == 4


@pytest.mark.parametrize("period", [1, 40])
def test_a_loop_that_exact_writes_after_a_rollback_is_reported_and_stays(period: int) -> None:
    loop = clean(period, seed=9) * (600 // period)
    own = [*clean(50), *loop]
    session = ScriptedSession([*clean(40), JUNK, JUNK, JUNK], own)
    rules = JunkRules(patterns=RULES.patterns)
    kept, events, guard = watch(session, limit=400, rules=rules)
    assert [type(event) for event in events] == [Withdrawn, Reported]
    assert "model's own" in events[-1].note
    assert kept == own[:400]
    assert guard.counts.rollbacks == 1


def test_without_slots_for_exact_it_stops_and_says_so() -> None:
    _, events, _ = watch(ScriptedSession([*clean(40), JUNK, JUNK, JUNK], base=Ladder(0, 4), has_exact=False))
    assert isinstance(events[0], Reported)
    assert "no FP4 slots" in events[0].note


def test_the_ladder_is_put_back_when_the_reader_leaves() -> None:
    text = clean(200)
    session = ScriptedSession([*text[:20], JUNK, JUNK, JUNK], text)
    events: Iterator[Event] = Guard(session, RULES).answer([5], 100, Sampler())  # type: ignore[arg-type]
    for _ in range(40):
        next(events)
    assert session.ladder == EXACT
    events.close()  # type: ignore[attr-defined]
    assert session.ladder == BASE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint, directory = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("guard") / "model"
    write_random_checkpoint(checkpoint, max_position_embeddings=400)
    layout(checkpoint, directory)
    requant(directory, "clip")
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def session(model: Path) -> Iterator[Session]:
    session = open_model(model, ladder="1,2", slots=(2, 4, 2, 4))
    yield session
    session.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [5, pytest.param(64, marks=pytest.mark.slow), 150])
def test_rewinding_leaves_no_trace(model: Path, length: int, device: str) -> None:
    text, wandering = clean(length), clean(60, seed=3)
    session, straight = (
        open_model(model, ladder="1,2", slots=(2, 4, 2, 4), device=device, dtype="float32") for _ in range(2)
    )
    session.prefill(text)
    mark = session.mark()
    for token_id in wandering:
        session.step(token_id)
    session.rewind(mark)
    assert session.token_ids == text
    session.ladder = Ladder.exact(2)
    straight.prefill(text)
    straight.ladder = Ladder.exact(2)
    for token_id in clean(20, seed=4):
        assert torch.equal(session.step(token_id), straight.step(token_id))
    session.close()
    straight.close()


def test_a_mark_of_another_sequence_is_refused(session: Session) -> None:
    session.prefill(clean(20))
    first = session.mark()
    session.prefill(clean(20, seed=1))
    second = session.mark()
    session.rewind(first)
    with pytest.raises(ValueError, match="of a sequence that was left"):
        session.rewind(second)
    session.rewind(first)
    session.reset()
    with pytest.raises(ValueError, match="of a sequence that was left"):
        session.rewind(first)


def test_a_ladder_without_slots_is_refused(model: Path) -> None:
    session = open_model(model, slots=(2, 0, 0, 0))
    assert not session.can_serve(Ladder(1, 2))
    with pytest.raises(StrawError, match="has not the slots"):
        session.ladder = Ladder(1, 2)
    session.close()


def test_a_guarded_answer_is_the_plain_one_where_nothing_happens(session: Session) -> None:
    prompt = clean(30)
    session.ladder = Ladder.exact(2)
    plain = list(session.generate(prompt, 40, temperature=1.0, seed=3))
    guard = Guard(session, JunkRules())
    events = list(guard.answer(prompt, 40, Sampler(1.0, seed=3)))
    assert [event.token_id for event in events if isinstance(event, Written)] == plain


@pytest.mark.parametrize(
    ("answer_ids", "findings", "reason"),
    [
        ([5, 6, 1], [], None),
        ([5, 6, 7, 8], [], None),
        ([5, 6, 7], [], "stopped before its end"),
        ([5, 1, 7, 8], [], "2 tokens after the end"),
        ([5, 6, 1], [Finding(Kind.LOOP, "a loop", 0)], "junk in the text: a loop"),
    ],
)
def test_speed_is_said_of_sound_text_only(answer_ids: list[int], findings: list[Finding], reason: str | None) -> None:
    found = invalid_reason(answer_ids, EOS_ID, 4, findings)
    assert found is None if reason is None else reason in str(found)


def test_withdrawn_text_is_marked_and_the_answer_goes_on() -> None:
    tokenizer = build_tokenizer()
    junk = tokenizer.encode("hello", add_special_tokens=False).ids
    text = tokenizer.encode("the world " * 3, add_special_tokens=False).ids
    session: Any = ScriptedSession([*text[:4], *junk, *text[:3]], text)
    output, notes = io.StringIO(), io.StringIO()
    stream = AnswerStream(session, tokenizer, Sampling(50, 0.0, 1.0, 0, junk=("hello",)), output, notes)
    stream.run([5, 6])
    assert "withdrawn" in notes.getvalue()
    assert tokenizer.decode(stream.answer_ids[:-1]) == tokenizer.decode(text)
    assert "speed invalid: junk in the text" in stream.line(2)


@pytest.mark.parametrize("unwanted", ["ell", "o w", "hello", " world", "我", "<", "d我们"])
def test_an_unwanted_text_is_found_however_it_is_cut_into_tokens(unwanted: str) -> None:
    """It begins in the token that holds its first byte."""
    tokenizer = build_tokenizer()
    rules = answer_rules(tokenizer, tokenizer.token_to_id(EOS), thinking=False, texts=(unwanted,))
    ids = tokenizer.encode("hey hello world我们 <", add_special_tokens=False).ids
    found = [finding for finding in audit(ids, rules) if "unwanted" in finding.message]
    before = "hey hello world我们 <".encode().index(unwanted.encode())
    spelled, ends = token_bytes(tokenizer), list[int]()
    for token_id in ids:
        ends.append(len(spelled[token_id]) + (ends[-1] if ends else 0))
    assert [finding.began for finding in found] == [next(n for n, end in enumerate(ends) if end > before)]
    assert not audit(tokenizer.encode("hey there", add_special_tokens=False).ids, rules)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ContextFullError("full")])
def test_generate_prints_what_there_is_of_an_answer_that_is_cut_off(
    stop: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = build_tokenizer()
    text = tokenizer.encode("the world", add_special_tokens=False).ids

    class Stopped(ScriptedSession):
        def step(self, token_id: int) -> Tensor:
            if self._length == len(text) - 1:
                raise stop
            return super().step(token_id)

    with pytest.raises(type(stop)):
        print_answer(Stopped(text), tokenizer, [5, 6], Sampling(50, 0.0, 1.0, 0))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "the world\n"


def test_special_tokens_are_misplaced_but_eos() -> None:
    tokenizer = build_tokenizer()
    rules = answer_rules(tokenizer, tokenizer.token_to_id(EOS), thinking=False)
    assert tokenizer.token_to_id(BOS) in rules.misplaced_ids
    assert tokenizer.token_to_id(EOS) not in rules.misplaced_ids
    thinking = answer_rules(tokenizer, tokenizer.token_to_id(EOS), thinking=True)
    assert tokenizer.token_to_id("</think>") in rules.misplaced_ids - thinking.misplaced_ids
