"""`runtime bench --prompts`: a speed for sound answers only, runs in turn with their seeds, and what the prompt file must be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

from prep.layout import layout
from prep.requant import requant
from runtime.answering import Sampling
from runtime.bench_prompts import (
    LEAST_REPEAT,
    SHIPPED,
    BenchPrompt,
    PromptRun,
    read_prompts,
    results,
    run_prompts,
    save_transcript,
    table,
)
from runtime.chat_template import ChatOptions
from runtime.cli import main
from runtime.errors import StrawError
from runtime.ladder import Ladder

EOS_ID, VOCAB, NUM_PICKS = 1, 512, 6
SAMPLING = Sampling(max_new_tokens=1, temperature=0.0, top_p=1.0, seed=40, guard=False)
PROMPTS = [BenchPrompt("first", "hello", 300), BenchPrompt("second", "hello world", 300)]
LOOP = [71, 72, 73, 74, 75] * 40
RUN = PromptRun("a", 0, 0, 5, 0.5, 11, 2.0, None, 0, 0, 0, "text")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


class ScriptedSession:
    """Stands for a Session, guarded or not: each answer is the next of `answers`; after a rollback it goes on with `mended`."""

    def __init__(self, tokenizer: Tokenizer, answers: list[list[int]], mended: Sequence[int] = (), context: int = 2048):
        self.tokenizer, self.directory, self.context = tokenizer, Path("model"), context
        self.config = SimpleNamespace(eos_token_id=EOS_ID, num_experts_per_tok=NUM_PICKS)
        self.ladder = Ladder(2, 4)
        self.drawn: list[tuple[list[int], tuple[object, ...]]] = []
        self.resets = 0
        self._answers, self._mended, self._length = answers, list(mended), 0

    def reset(self) -> None:
        self.resets += 1

    def generate(self, prompt_ids: Sequence[int], *options: object) -> Iterator[int]:
        self.drawn.append((list(prompt_ids), options))
        yield from self._answers.pop(0)

    def extend(self, prompt_ids: Sequence[int]) -> Tensor:
        self._script, self._length = self._answers.pop(0), 0
        return self._logits()

    def step(self, token_id: int) -> Tensor:
        self._length += 1
        return self._logits()

    def mark(self) -> int:
        return self._length

    def rewind(self, mark: int) -> None:
        self._script, self._length = [*self._script[: mark + 1], *self._mended], mark

    def can_serve(self, ladder: Ladder) -> bool:
        return True

    def _logits(self) -> Tensor:
        logits = torch.zeros(VOCAB)
        logits[self._script[self._length] if self._length < len(self._script) else EOS_ID] = 1.0
        return logits


def clean(seed: int, num_tokens: int = 60) -> list[int]:
    ids = torch.randint(20, 250, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [*ids.tolist(), EOS_ID]


def run(session: Any, prompts: list[BenchPrompt], sampling: Sampling = SAMPLING, repeat: int = 1) -> list[PromptRun]:
    return list(run_prompts(session, prompts, sampling, repeat, ChatOptions()))


def test_runs_take_turns_from_an_empty_sequence_with_seeds_in_order(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, [clean(number) for number in range(6)])
    runs = run(session, PROMPTS, replace(SAMPLING, temperature=0.7), repeat=3)
    assert [(one.prompt, one.repeat, one.seed) for one in runs] == [
        (name, number, 40 + number) for number in range(3) for name in ("first", "second")
    ]
    assert [options for _, options in session.drawn] == [(300, 0.7, 1.0, one.seed) for one in runs]
    assert session.resets == 6
    assert [len(ids) for ids, _ in session.drawn[:2]] == [one.prompt_tokens for one in runs[:2]]
    assert all(one.invalid is None and one.tokens == 61 and one.tokens_per_second for one in runs)
    assert runs[0].transcript == tokenizer.decode(clean(0)[:-1]) + "\n"


@pytest.mark.parametrize("guard", [False, True])
def test_a_planted_loop_has_no_speed(tokenizer: Tokenizer, guard: bool) -> None:
    answers = [clean(1), clean(2)[:20] + LOOP + [EOS_ID], clean(3)]
    session = ScriptedSession(tokenizer, answers, mended=[EOS_ID])
    document = results(run(session, PROMPTS[:1], replace(SAMPLING, guard=guard), repeat=3))
    assert [row["tokens_per_second"] is None for row in document["runs"]] == [False, True, False]
    bad = document["runs"][1]
    assert bad["invalid"].startswith("junk in the text: ")
    assert bad["decode_seconds"] is None
    assert (bad["rollbacks"] == 1) == guard
    assert (bad["withdrawn_tokens"] > 0) == guard
    assert document["prompts"][0]["findings"] == [0, bad["findings"], 0]
    assert bad["findings"] >= 1
    alone = results([PromptRun(**{name: bad[name] for name in PromptRun.__slots__})])
    lines = table(alone)
    assert "tokens/s" not in "\n".join(lines[1:])
    assert lines[-1].startswith("no speed: no run is valid; 1 of 1 runs invalid")
    assert alone["slowest"] is alone["median_tokens_per_second"] is None
    assert ("withdrawn" in bad["transcript"]) == guard


@pytest.mark.parametrize(
    ("answer", "limit", "reason"),
    [
        (clean(1)[:-1], 61, "it was stopped before its end"),
        ([*clean(1), 30, 31], 63, "2 tokens after the end of the text"),
        ([EOS_ID], 61, "1 token, too few for a speed"),
    ],
)
def test_other_answers_without_a_speed(tokenizer: Tokenizer, answer: list[int], limit: int, reason: str) -> None:
    (one,) = run(ScriptedSession(tokenizer, [answer]), [BenchPrompt("a", "hello", limit)])
    assert (one.invalid, one.tokens_per_second) == (reason, None)


def test_medians_are_of_valid_runs_alone() -> None:
    bad = replace(RUN, decode_seconds=None, invalid="a loop", findings=192, withdrawn_tokens=30)
    slow = replace(RUN, prompt="b", decode_seconds=5.0, first_token_seconds=3.0)
    never = replace(bad, prompt="c", first_token_seconds=9.0)
    document = results([RUN, slow, never, replace(RUN, decode_seconds=1.0), slow, never, bad, replace(bad, prompt="b")])
    first, second, third = document["prompts"]
    assert (first["tokens_per_second"], first["range"], first["valid_runs"], first["num_runs"]) == (7.5, [5, 10], 2, 3)
    assert (second["tokens_per_second"], second["first_token_seconds"]) == (2.0, 3.0)
    assert (third["tokens_per_second"], third["first_token_seconds"], third["valid_runs"]) == (None, None, 0)
    assert (document["slowest"], document["slowest_tokens_per_second"]) == ("b", 2.0)
    assert document["median_tokens_per_second"] == 4.75
    assert (document["invalid_runs"], document["findings"], document["withdrawn_tokens"]) == (4, 768, 120)
    lines = table(document)
    assert lines[3].split()[:3] == ["c", "0/2", "invalid"]
    assert lines.count("c, run 1: invalid: a loop") == 2
    assert "slowest prompt: b, 2.00 tokens/s" in lines[-1]
    assert "1 prompts without a valid run" in lines[-1]


def test_a_prompt_that_does_not_fit_is_said_before_the_first_run(tokenizer: Tokenizer) -> None:
    session = ScriptedSession(tokenizer, [], context=304)
    with pytest.raises(StrawError, match=r"prompt second: \d+ tokens and 300 for its answer, the context has 304"):
        run(session, PROMPTS)
    assert session.resets == 0


def test_the_set_that_ships() -> None:
    prompts = read_prompts(SHIPPED)
    assert len(prompts) == 8
    assert all(384 <= prompt.tokens <= 1024 for prompt in prompts)
    assert max(prompts, key=lambda prompt: prompt.tokens).name == "article"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[", "not a set of prompts"),
        ('{"a": 1}', r"not a set of prompts \(it holds an object\)"),
        ('["a"]', r"not a set of prompts \(prompt 0 is text\)"),
        ('[{"a": 1}]', r"not a set of prompts \(prompt 0 has a\)"),
        ('[{"name": "a", "prompt": "b"}]', "not a set of prompts"),
        ("[]", "no prompt in it"),
        ('[{"name": "../a", "prompt": "b", "tokens": 9}]', "prompt 0: name is '../a'"),
        ('[{"name": "a", "prompt": "b", "tokens": true}]', "prompt 0: tokens is True"),
        ('[{"name": "a", "prompt": 3, "tokens": 9}]', "prompt 0: prompt is 3"),
        ('[{"name": "a", "prompt": " ", "tokens": 9}]', "prompt 0: empty, expected a prompt"),
        (
            '[{"name": "a", "prompt": "b", "tokens": 9}, {"name": "a", "prompt": "c", "tokens": 9}]',
            "prompt 1: name is 'a', .*each name once",
        ),
    ],
)
def test_a_bad_set_is_named(tmp_path: Path, content: str, expected: str) -> None:
    file = tmp_path / "set.json"
    file.write_text(content)
    with pytest.raises(StrawError, match=rf"set\.json: {expected}"):
        read_prompts(file)
    with pytest.raises(StrawError, match=r"none\.json: .*\(No such file or directory\).*another --prompts"):
        read_prompts(tmp_path / "none.json")


def test_a_transcript_is_a_file(tmp_path: Path) -> None:
    save_transcript(tmp_path / "out", replace(RUN, repeat=1, transcript="héllo\n"))
    assert (tmp_path / "out" / "a-2.txt").read_text(encoding="utf-8") == "héllo\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    write_random_checkpoint(root / "checkpoint", n_routed_experts=8, num_experts_per_tok=2, hidden_size=128)
    build_tokenizer().save(str(root / "checkpoint" / "tokenizer.json"))
    layout(root / "checkpoint", root / "model")
    requant(root / "model", "clip")
    return root / "model"


def end_of(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_the_command_keeps_transcripts_beside_numbers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "set.json", tmp_path / "out"
    file.write_text(json.dumps([{"name": "a", "prompt": "hello", "tokens": 4}]))
    assert end_of(["bench", str(model), "--prompts", str(file), "--device", "cpu", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert document == json.loads((out / "bench.json").read_text())
    runs = document["results"]["runs"]
    assert len(runs) == LEAST_REPEAT
    assert [one["transcript"] for one in runs] == [
        (out / f"a-{number}.txt").read_text(encoding="utf-8") for number in (1, 2, 3)
    ]
    assert lines[0].startswith("prompt")


def test_an_interrupted_bench_leaves_numbers_of_the_transcripts_beside_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "set.json", tmp_path / "out"
    file.write_text(json.dumps([{"name": "a", "prompt": "hello", "tokens": 4}]))
    out.mkdir()
    (out / "bench.json").write_text("of an earlier run")

    def two(*_: object) -> Iterator[PromptRun]:
        yield from (RUN, replace(RUN, repeat=1))
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.bench_prompts.run_prompts", two)
    assert end_of(["bench", str(model), "--prompts", str(file), "--device", "cpu", "--out", str(out)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: interrupted; --out has the runs that have ended")
    found = json.loads((out / "bench.json").read_text())["results"]
    assert (len(found["runs"]), found["planned_runs"]) == (2, LEAST_REPEAT)


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--repeat", "2"], 2, "answers differ from run to run"),
        (["--variants", "off"], 2, "--variants means nothing with"),
        (["--force-tokens", "x", "--out", "y"], 2, "--out means nothing with"),
        (["--context", "64"], 1, "the context has 64"),
    ],
)
def test_options_that_do_not_go_together(
    model: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, expected: str
) -> None:
    assert end_of(["bench", str(model), "--device", "cpu", *options]) == code
    assert expected in " ".join(capsys.readouterr().err.split())
