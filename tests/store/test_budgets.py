"""Bytes to slots: what a ladder can fill, what the user tuned, what is left of a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.errors import StrawError
from runtime.predictors import HASH, LEARNED, OFF
from runtime.store import budgets
from runtime.store.budgets import Budgets, bytes_left, resident_bytes, scarcity_watch
from runtime.store.pools import Layout, Shares, Slots, slots_for_bytes
from runtime.store.tuned import AUTO, MEASURED, PREFETCHES, Tuned, read_tuned, taken_line, write_tuned

CPU = torch.device("cpu")
TWO_COPIES = Layout(("fp4",), ("int2",), {"fp4": 100, "int2": 50})


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (Shares(0.5, 0.5), Slots(50, 40, 100, 80)),
        (Shares(1.0, 1.0), Slots(100, 80, 0, 0)),
        (Shares(0.0, 0.0), Slots(0, 0, 200, 160)),
    ],
)
def test_shares_divide_the_bytes(shares: Shares, expected: Slots) -> None:
    assert slots_for_bytes(10_000, 8_000, TWO_COPIES, shares, num_experts=1000, num_picks=6) == expected


def test_two_bit_gets_the_slots_of_one_token_unless_its_share_is_nothing() -> None:
    assert slots_for_bytes(1000, 0, TWO_COPIES, Shares(), num_experts=1000, num_picks=6) == Slots(7, 0, 6, 0)


def test_a_ram_budget_is_for_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "available_ram_bytes", lambda: 10_000_000_000)
    monkeypatch.setattr(budgets, "resident_bytes", lambda: 700_000_000)
    assert bytes_left(Budgets(None, 2_000_000_000), CPU, 0) == (1_300_000_000, 0)
    assert bytes_left(Budgets(1_000_000_000, 2_000_000_000), CPU, 50_000_000) == (950_000_000, 1_300_000_000)
    with pytest.raises(StrawError, match="12,000,000,000 bytes: 10,000,000,000 are available beside 700,000,000"):
        bytes_left(Budgets(None, 12_000_000_000), CPU, 0)


def test_the_process_has_memory_of_its_own() -> None:
    before = resident_bytes()
    block = torch.ones(64_000_000, dtype=torch.uint8)
    assert resident_bytes() - before > 50_000_000
    assert block[0] == 1


def test_scarce_memory_is_said_once_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10**9, 10**8, 10**8, 10**9, 10**8])
    monkeypatch.setattr(budgets, "available_ram_bytes", lambda: next(free))
    said: list[str] = []
    watch = scarcity_watch(CPU, said.append)
    for _ in range(5):
        watch()
    assert len(said) == 2
    assert "RAM: only 100,000,000 bytes" in said[0]


def test_tuned_shares(tmp_path: Path) -> None:
    assert read_tuned(tmp_path).shares == Shares()
    (tmp_path / "runtime.toml").write_text("[pools]\nfp4_vram = 0.5\n")
    assert read_tuned(tmp_path) == Tuned(Shares(0.5, Shares().fp4_ram))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    values = {str: 'held "out" \\ 我们\n\t\x7f🙂', int: 2048, float: 1.0000001}
    measured = {name: values[kind] for name, kind in MEASURED.items()}
    tuned = Tuned(Shares(0.8, 1.0), "mass:0.5,0.9", "hash", measured)
    assert write_tuned(tmp_path, tuned).read_text(encoding="utf-8").startswith("# Written by `runtime tune`.")
    assert read_tuned(tmp_path) == tuned
    write_tuned(tmp_path, Tuned())
    assert read_tuned(tmp_path) == Tuned()


def test_the_prefetch_that_a_file_may_have_is_the_runtime_s() -> None:
    assert PREFETCHES == (OFF, HASH, LEARNED)


def test_what_a_session_takes_is_said() -> None:
    tuned = Tuned(Shares(0.8, 0.6), "2,4", "hash", {"when": "today"})
    said = {
        (ladder, prefetch, has_slots): taken_line(tuned, ladder=ladder, prefetch=prefetch, has_slots=has_slots)
        for ladder, prefetch, has_slots in [(AUTO, AUTO, False), (AUTO, "off", True), ("exact", AUTO, True)]
    }
    assert list(said.values()) == [
        "runtime.toml: ladder 2,4, prefetch hash, FP4 shares 0.8 in VRAM and 0.6 in RAM (measured today)",
        "runtime.toml: ladder 2,4 (measured today)",
        "runtime.toml: prefetch hash (measured today)",
    ]
    assert taken_line(tuned, ladder="exact", prefetch="off", has_slots=True) is None
    assert taken_line(Tuned(), ladder=AUTO, prefetch=AUTO, has_slots=False) is None


@pytest.mark.parametrize(
    "content",
    [
        "[pools]\nfp4_vram = 2\n",
        "[pools]\nfp4 = 0.5\n",
        "pool = 1\n",
        "pools = 3\n",
        "[pools\n",
        "[pools]\nfp4_ram = true\n",
        "ladder = 4\n",
        'ladder = "4,2"\n',
        'ladder = "auto"\n',
        'prefetch = "auto"\n',
        "prefetch = 3\n",
        "prefetch = []\n",
        "measured = 3\n",
        "[measured]\nspeed = 3\n",
        "[measured]\nppl_ratio = true\n",
        "[measured]\nwhen = 3\n",
    ],
)
def test_a_damaged_runtime_toml_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "runtime.toml").write_text(content)
    with pytest.raises(StrawError, match=r"runtime\.toml: .*correct or remove it"):
        read_tuned(tmp_path)
