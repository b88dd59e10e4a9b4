"""Choices of block sizes: which table counts, what is kept, what is refused. No card: its name and its timer are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kernels import tuning
from kernels.tuning import Config, choose, read_table, ship, write_table

CARD = torch.device("cuda", 0)
SMALL, LARGE = {"ROWS": 16}, {"ROWS": 32}


@pytest.fixture(autouse=True)
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that runs taller blocks faster, with empty tables."""
    monkeypatch.setattr(tuning, "card_name", lambda device: "card")
    monkeypatch.setattr(tuning, "user_directory", lambda: tmp_path / "user")
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuning, "_run_us", lambda run, device: 1 / run())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget()


def forget() -> None:
    """As in a new process."""
    tuning._shipped.cache_clear()
    tuning._own.cache_clear()
    tuning._asked.clear()


def chosen(*candidates: Config, key: str = "shape") -> Config:
    return choose("op", key, candidates, lambda config: config["ROWS"], CARD)


def never(config: Config) -> None:
    raise AssertionError("timed, though the choice is stored")


def test_the_fastest_is_chosen_once_and_kept(tmp_path: Path) -> None:
    assert chosen(SMALL, LARGE) == LARGE
    forget()
    assert choose("op", "shape", [SMALL, LARGE], never, CARD) == LARGE
    assert read_table(tmp_path / "user" / "card.json") == {"op/shape": LARGE}


def test_the_shipped_table_counts_before_the_users(tmp_path: Path) -> None:
    chosen(SMALL, LARGE)
    write_table(tmp_path / "shipped" / "card.json", {"op/shape": SMALL})
    forget()
    assert choose("op", "shape", [SMALL, LARGE], never, CARD) == SMALL


def test_a_choice_that_is_no_candidate_any_more_is_made_again(tmp_path: Path) -> None:
    write_table(tmp_path / "shipped" / "card.json", {"op/shape": {"ROWS": 8}})
    assert chosen(SMALL, LARGE) == LARGE


def test_what_another_process_kept_stays(tmp_path: Path) -> None:
    chosen(SMALL, LARGE)
    write_table(tmp_path / "user" / "card.json", {"op/other": SMALL})
    chosen(SMALL, key="third")
    assert set(read_table(tmp_path / "user" / "card.json")) == {"op/other", "op/third"}


def test_ship_writes_what_this_process_asked_for(tmp_path: Path) -> None:
    write_table(tmp_path / "shipped" / "card.json", {"op/old": SMALL})
    write_table(tmp_path / "user" / "card.json", {"op/of a test": SMALL})
    chosen(SMALL, LARGE)
    assert read_table(ship(CARD)) == {"op/old": SMALL, "op/shape": LARGE}


def test_a_home_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "user").write_text("a file where the directory should be")
    with pytest.warns(UserWarning, match="timed again in each process"):
        assert chosen(SMALL, LARGE) == LARGE
    assert choose("op", "shape", [SMALL, LARGE], never, CARD) == LARGE


@pytest.mark.parametrize("content", ["", "[1]", '{"op/shape": 3}', '{"op/shape": {"ROWS": "16"}}'])
def test_a_damaged_table_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "card.json").write_text(content)
    with pytest.raises(ValueError, match=r"card.json: .*remove it"):
        chosen(SMALL, LARGE)


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="not tuned yet"):
        chosen(SMALL, LARGE)


def test_a_cpu_takes_the_first() -> None:
    assert choose("op", "shape", [SMALL, LARGE], never, torch.device("cpu")) == SMALL


def test_shipped_tables_are_tables() -> None:
    for path in (Path(tuning.__file__).parent / "tuned").glob("*.json"):
        assert read_table(path) and path.read_text() == json.dumps(read_table(path), indent=1, sort_keys=True) + "\n"
