"""`runtime tune`: what planted measurements lead to, and that a session opened afterwards uses what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.cli import main
from runtime.errors import StrawError
from runtime.eval_rows import read_model
from runtime.store.pools import Shares
from runtime.store.tuned import Tuned, read_tuned, taken_line, write_tuned
from runtime.tune import Plan, plan_for, results, search, table
from runtime.tune_state import FinishedTrials, forget_trials
from runtime.tune_trials import ModelMeasurer, Quality, Trial, TuneSettings

OTHER = Shares(0.5, 0.5)
PLAN = Plan(("exact", "4,6", "2,4", "0,6"), (OTHER,), ("hash", "predictor"), num_picks=6)
WORDS = "hello world 我们必须 hello hello world " * 12
SLOTS = ("4", "0", "2", "0")


@dataclass
class Planted:
    """A measurer that has an answer for each ladder, and factors for shares and prefetch."""

    ratios: dict[str, float]
    times: dict[str, float]
    other_shares: tuple[float, float] = (1.0, 1.0)  # ratio, time
    hash: float = 1.0
    predictor: float = 1.0
    timed: list[Trial] = field(default_factory=list)
    judged: list[Trial] = field(default_factory=list)

    def quality(self, trial: Trial) -> Quality:
        self.judged.append(trial)
        return Quality(self.ratios[trial.ladder] * (self.other_shares[0] if trial.shares == OTHER else 1), 0.001, 9)

    def ms_per_token(self, trial: Trial) -> float:
        self.timed.append(trial)
        factor = {"off": 1.0, "hash": self.hash, "predictor": self.predictor}[trial.prefetch]
        return self.times[trial.ladder] * factor * (self.other_shares[1] if trial.shares == OTHER else 1)


RATIOS = {"4,6": 1.005, "2,4": 1.018, "0,6": 1.2}
TIMES = {"exact": 100.0, "4,6": 80.0, "2,4": 50.0, "0,6": 20.0}


@pytest.mark.parametrize(
    ("budget", "planted", "expected"),
    [
        (1.02, Planted(RATIOS, TIMES), Trial("2,4")),
        (1.01, Planted(RATIOS, TIMES), Trial("4,6")),
        (1.0, Planted(RATIOS, TIMES), Trial("exact")),
        (1.5, Planted(RATIOS, TIMES), Trial("0,6")),
        (1.02, Planted(RATIOS | {"2,4": float("nan")}, TIMES), Trial("4,6")),
        (1.02, Planted(RATIOS | {"2,4": 1.0195}, TIMES), Trial("4,6")),  # a standard error more is too much
        (1.02, Planted(RATIOS, TIMES | {"4,6": 50.5}), Trial("4,6")),  # a tie goes to the better quality
        (
            1.02,
            Planted(RATIOS | {"4,6": 0.98}, TIMES | {"2,4": 99.0, "4,6": 101.0}),
            Trial("exact"),
        ),  # below 1 is noise
        (1.02, Planted(RATIOS, TIMES, (1.0, 0.9)), Trial("2,4", OTHER)),
        (1.02, Planted(RATIOS, TIMES, (1.01, 0.9)), Trial("2,4")),  # faster, but over the budget with these shares
        (1.02, Planted(RATIOS, TIMES, (1.0, 0.99)), Trial("2,4")),  # not more than noise
        (1.02, Planted(RATIOS, TIMES, hash=0.9, predictor=0.8), Trial("2,4", prefetch="predictor")),
        (1.02, Planted(RATIOS, TIMES, (1.0, 0.9), hash=0.8), Trial("2,4", OTHER, "hash")),
        (1.0, Planted(RATIOS, TIMES, hash=0.8), Trial("exact", prefetch="hash")),
    ],
)
def test_the_fastest_within_the_budget_is_chosen(budget: float, planted: Planted, expected: Trial) -> None:
    trials = search(PLAN, planted, budget)
    chosen = trials[-1]
    assert chosen.trial == expected
    assert chosen.quality is not None
    assert chosen.quality.at_most <= budget
    assert chosen.ms_per_token == min(one.ms_per_token for one in trials if one.trial == expected)


def test_nothing_is_measured_that_cannot_matter() -> None:
    planted = Planted(RATIOS, TIMES)
    trials = search(PLAN, planted, 1.02)
    assert planted.judged == [Trial("4,6"), Trial("2,4"), Trial("0,6")]
    assert planted.timed == [
        *map(Trial, ("exact", "4,6", "2,4")),
        Trial("2,4", OTHER),
        Trial("2,4", prefetch="hash"),
        Trial("2,4", prefetch="predictor"),
    ]
    exact = Planted(RATIOS, TIMES)
    assert search(PLAN, exact, 1.0)[-1].trial == Trial("exact")
    assert exact.timed == [Trial("exact"), Trial("exact", prefetch="hash"), Trial("exact", prefetch="predictor")]
    lines = table(results(trials, 1.02))
    assert lines[3].split()[4:7] == ["1.0180", "0.0010", "1.0190"]
    assert [line.split()[-1] for line in lines[2:5]] == ["80.000", "chosen", "1.02"]
    assert len(lines) == 1 + len(trials) - 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(
        directory,
        compress_ratios=[0, 0, 0],
        num_hidden_layers=2,
        num_hash_layers=1,
        hidden_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def new_model(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    def made(code: str | None = "clip") -> Path:
        layout(checkpoint, tmp_path / "model")
        if code is not None:
            requant(tmp_path / "model", code)
        return tmp_path / "model"

    return made


def test_the_plan_follows_the_model(new_model: Callable[..., Path]) -> None:
    directory = new_model(None)
    assert plan_for(read_model(str(directory))) == Plan(("exact",), (), ("hash",), 2)
    requant(directory, "clip")
    plan = plan_for(read_model(str(directory)))
    assert plan.ladders == ("exact", "1,2", "0,2", "mass:0.5,0.9")
    (directory / "predictor.safetensors").touch()
    assert plan_for(read_model(str(directory))).prefetches == ("hash", "predictor")


def test_real_trials(new_model: Callable[..., Path], tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text(WORDS)
    said: list[str] = []
    settings = TuneSettings((text,), tokens=12, steps=3, prompt_tokens=4, repeat=2, context=64)
    measurer = ModelMeasurer(read_model(str(new_model())), settings, said.append, said.append)
    assert measurer.quality(Trial("exact")).ppl_ratio == pytest.approx(1, abs=1e-6)
    assert abs(measurer.quality(Trial("0,2")).ppl_ratio - 1) > 1e-4
    assert measurer.ms_per_token(Trial("0,2", prefetch="hash")) > 0
    assert said == ["quality of exact", "quality of 0,2", "speed of 0,2"]
    assert measurer._session is not None
    assert measurer._session._experts.prefetcher is not None  # type: ignore[union-attr]
    measurer.close()
    with pytest.raises(StrawError, match="expected at least 900 of both"):
        ModelMeasurer(
            read_model(str(tmp_path / "model")), TuneSettings((text,), steps=896, prompt_tokens=4), print, print
        )


@pytest.mark.parametrize(
    ("num_documents", "scored"), [(1, [2, 2, 2, 2]), (3, [2, 2, 2, 2]), (4, [2, 2, 2, 2]), (9, [2, 2, 2, 2])]
)
def test_several_documents_are_scored_where_there_are_some_else_several_pieces(
    new_model: Callable[..., Path], tmp_path: Path, num_documents: int, scored: list[int]
) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text(f"{json.dumps({'text': WORDS})}\n" * num_documents)
    settings = TuneSettings((text,), tokens=8, steps=3, prompt_tokens=4, context=64)
    measurer = ModelMeasurer(read_model(str(new_model(None))), settings, print, print)
    assert [len(sequence.targets) for sequence in measurer._held_out] == scored


def test_one_token_has_no_standard_error(new_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    settings = TuneSettings((tmp_path / "a.txt",), tokens=1, steps=3, prompt_tokens=4, context=64)
    with pytest.raises(StrawError, match="one sequence of 1 tokens to score, expected two or more"):
        ModelMeasurer(read_model(str(new_model(None))), settings, print, print)
    with pytest.raises(StrawError, match="context is 0"):
        ModelMeasurer(read_model(str(tmp_path / "model")), replace(settings, context=0), print, print)


def test_a_tune_that_is_cut_off_goes_on(new_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    model, settings = read_model(str(new_model())), TuneSettings((tmp_path / "a.txt",))

    @dataclass
    class CutOff(Planted):
        def ms_per_token(self, trial: Trial) -> float:
            if trial.ladder == "2,4":
                raise KeyboardInterrupt
            return super().ms_per_token(trial)

    first, second, told = CutOff(RATIOS, TIMES), Planted(RATIOS, TIMES), list[str]()
    with pytest.raises(KeyboardInterrupt), closing(FinishedTrials(model, settings, first, print)) as trials:
        search(PLAN, trials, 1.02)
    with pytest.raises(StrawError, match=r"begun with steps 64, expected 9"):
        FinishedTrials(model, replace(settings, steps=9), second, print)
    with closing(FinishedTrials(model, settings, second, told.append)) as trials:
        assert search(PLAN, trials, 1.02) == search(PLAN, Planted(RATIOS, TIMES), 1.02)
    assert not second.judged and Trial("4,6") not in second.timed and Trial("2,4") in second.timed
    assert "quality of 4,6" in told
    forget_trials(model)
    assert not list(model.directory.glob("runtime.toml*"))


def opened(directory: Path, **options: Any) -> tuple[str, bool]:
    """The ladder of a session on it, and whether it prefetches."""
    session = open_model(directory, **options)
    prefetcher = session._experts.prefetcher  # type: ignore[union-attr]
    session.close()
    return str(session.ladder), prefetcher is not None


def test_auto_takes_the_file_and_an_option_wins(new_model: Callable[..., Path]) -> None:
    directory = new_model()
    assert opened(directory, ladder="auto", prefetch="auto") == ("2,2", False)  # all of it fits at FP4
    write_tuned(directory, Tuned(Shares(), "0,2", "hash"))
    assert opened(directory, ladder="auto", prefetch="auto") == ("0,2", True)
    assert opened(directory, ladder="1,2", prefetch="off") == ("1,2", False)
    assert opened(directory) == ("2,2", False)


def test_shares_asked_for_win_over_tuned_ones(new_model: Callable[..., Path]) -> None:
    directory = new_model()
    write_tuned(directory, Tuned(Shares(0.9, 0.9)))
    lines = []
    for shares in (None, Shares(0.9, 0.9), Shares(0.2, 0.2)):
        session = open_model(directory, ladder="1,2", shares=shares, vram="4MB", ram="4GB")
        lines.append(session.experts_line)
        session.close()
    assert lines[0] == lines[1] != lines[2]


def test_a_tuned_ladder_that_the_model_cannot_have_names_the_file(new_model: Callable[..., Path]) -> None:
    directory = new_model(None)
    for ladder in ("0,2", "3,4"):
        write_tuned(directory, Tuned(ladder=ladder))
        with pytest.raises(StrawError, match=r"runtime\.toml: .*; or remove this file$"):
            open_model(directory, ladder="auto")


def test_a_file_of_another_model_or_code_is_refused(
    new_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = new_model()
    own = read_model(str(directory)).identity["fingerprint"]
    for measured in ({"fingerprint": "0" * 64}, {"fingerprint": own, "code": "split"}):
        write_tuned(directory, Tuned(Shares(), "0,2", "off", measured))
        with pytest.raises(StrawError, match=r"runtime\.toml: measured on .* in use; run runtime tune again"):
            open_model(directory, ladder="auto")
        open_model(directory).close()  # takes nothing from it
    write_tuned(directory, Tuned(Shares(), "0,2", "off", {"fingerprint": own, "code": "int2"}))
    requant(directory, "split")
    command = ["generate", str(directory), "--prompt", "hello", "--device", "cpu", "--max-new-tokens", "1"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--code", "split"])
    assert end.value.code == 1
    assert "measured on code int2, this model has split in use" in capsys.readouterr().err


def test_other_budgets_than_the_tuned_ones_are_said() -> None:
    tuned = Tuned(Shares(), "2,4", None, {"vram": "22GB", "ram": "free"})

    def line(**budgets: str) -> str:
        return str(taken_line(tuned, ladder="auto", prefetch="off", has_slots=False, **budgets))

    assert line(vram="22000MB") == "runtime.toml: ladder 2,4 (for vram 22GB, for ram free)"
    assert line(vram="10GB", ram="9GB").endswith("; vram is 10GB and ram is 9GB now, another choice may be better: run runtime tune again")  # fmt: skip
    assert "vram is free now" in line()


def test_a_budget_below_exact_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for ratio in ("0.99", "nan"):
        with pytest.raises(SystemExit) as end:
            main(["tune", "nowhere", "--text", "x", "--max-ppl-ratio", ratio])
        assert end.value.code == 2
        assert "expected at least 1" in capsys.readouterr().err


def test_the_command_writes_what_chat_takes(
    new_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, text = new_model(), tmp_path / "a.txt"
    text.write_text(WORDS)
    command = ["tune", str(directory), "--text", str(text), "--device", "cpu", "--context", "64", "--tokens", "8"]
    command += ["--steps", "2", "--prompt-tokens", "3", "--repeat", "1"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--dry-run"])
    assert end.value.code == 0
    assert "quality on at most 8 tokens" in capsys.readouterr().out
    assert not (directory / "runtime.toml").exists()
    with pytest.raises(SystemExit) as end:
        main([*command, "--max-ppl-ratio", "100"])
    assert end.value.code == 0
    chosen = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["chosen"]
    tuned = read_tuned(directory)
    assert (tuned.ladder, tuned.prefetch) == (chosen["ladder"], chosen["prefetch"])
    assert tuned.measured["max_ppl_ratio"] == 100
    assert (tuned.measured["text"], tuned.measured["tokens"]) == ("a.txt", 8)
    assert [path.name for path in directory.glob("runtime.toml*")] == ["runtime.toml"]
    with pytest.raises(SystemExit):
        main(["generate", str(directory), "--prompt", "hello", "--device", "cpu", "--max-new-tokens", "1"])
    assert f"runtime.toml: ladder {tuned.ladder}, prefetch {tuned.prefetch}" in capsys.readouterr().err
