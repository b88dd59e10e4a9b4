"""Replay: the two trace formats, Belady against all possible choices, and the store's residency against its LFU."""

from __future__ import annotations

import lzma
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.trace_files import Document, TraceRecord, TraceShape, write_record, write_shard
from predictor.traces import Trace as Recorded
from runtime.errors import StrawError
from runtime.store.replay import Belady, Lfu, Lru, Trace, from_recorded, hit_rate, load_trace, main, replay
from runtime.store.residency import ExpertKey, PoolSizes, Read, Residency

TRACES = Path(__file__).parents[1] / "traces"
KIMI = TRACES / "kimi_linear_300_tokens.jsonl.xz"
QWEN = TRACES / "qwen3_30b_a3b_128_tokens.csv.xz"


def hits(trace: Trace, policy: Lru | Lfu | Belady, num_slots: int) -> int:
    return sum(token_hits for token_hits, _ in replay(trace, policy, num_slots))


def one_layer(*tokens: list[int]) -> Trace:
    return Trace("tiny", 8, False, [[picks] for picks in tokens])


def most_hits(trace: Trace, num_slots: int) -> int:
    """The most hits of any choice of victims, by trying all of them."""
    waves = [frozenset(keys) for token in trace.tokens() for keys in token]

    @cache
    def best(position: int, held: frozenset[ExpertKey]) -> int:
        if position == len(waves):
            return 0
        wave = waves[position]
        others = sorted(held - wave)
        num_kept = min(len(others), num_slots - len(wave))
        choices = (wave.union(kept) for kept in combinations(others, num_kept))
        return len(held & wave) + max(best(position + 1, choice) for choice in choices)

    return best(0, frozenset())


picks = st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True)
tiny_traces = st.lists(st.lists(picks, min_size=1, max_size=2), min_size=1, max_size=8).map(
    lambda tokens: Trace("tiny", 6, False, tokens)
)


@given(trace=tiny_traces, num_slots=st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_belady_has_as_many_hits_as_the_best_of_all_choices(trace: Trace, num_slots: int) -> None:
    optimum = most_hits(trace, num_slots)
    assert hits(trace, Belady(trace), num_slots) == optimum
    assert hits(trace, Lru(), num_slots) <= optimum
    assert hits(trace, Lfu(2), num_slots) <= optimum


@pytest.mark.parametrize(
    ("num_slots", "lru", "lfu", "belady"),
    [(2, 1, 2, 2), (3, 1, 2, 3), (4, 4, 4, 4)],
)
def test_hits_counted_by_hand(num_slots: int, lru: int, lfu: int, belady: int) -> None:
    trace = one_layer([0], [0], [1], [2], [3], [0], [1], [2])
    assert hits(trace, Lru(), num_slots) == lru
    assert hits(trace, Lfu(100), num_slots) == lfu
    assert hits(trace, Belady(trace), num_slots) == belady


def test_a_working_set_beyond_the_slots_leaves_lru_without_a_hit() -> None:
    trace = one_layer(*[[0], [1], [2]] * 5)
    assert hits(trace, Lru(), 2) == 0
    assert hits(trace, Belady(trace), 2) == 6


def test_slots_below_one_layer_are_an_error() -> None:
    with pytest.raises(StrawError, match=r"--slots 2: tiny needs 3"):
        replay(one_layer([0, 1, 2]), Lru(), 2)


def test_kimi_trace() -> None:
    trace = load_trace(KIMI)
    assert (len(trace.picks), trace.num_layers, trace.num_experts, trace.is_ranked) == (300, 26, 256, False)
    assert trace.picks[0][0] == [36, 38, 85, 103, 116, 133, 138, 255]
    assert all(len(set(experts)) == 8 for layers in trace.picks for experts in layers)


def test_qwen_trace() -> None:
    trace = load_trace(QWEN)
    assert (len(trace.picks), trace.num_layers, trace.num_experts, trace.is_ranked) == (156, 48, 128, True)
    assert trace.picks[0][0] == [49, 19, 58, 29, 16, 70]  # by router weight
    assert [len(layers) for layers in trace.picks] == [47] * 27 + [
        48
    ] * 129  # prompt tokens need no last layer but the last


@pytest.mark.parametrize(
    ("share", "lru", "lfu", "belady"),
    [(0.03, 0.0, 0.31, 0.51), (0.16, 0.62, 0.65, 0.80)],
)
def test_kimi_hit_rates_are_those_of_an_earlier_replay_by_other_code(
    share: float, lru: float, lfu: float, belady: float
) -> None:
    """After 20 % of the tokens; tests/traces/README.md. Figures were given to the point."""
    trace = load_trace(KIMI)
    num_slots = round(share * trace.num_layers * trace.num_experts)
    for policy, expected in ((Lru(), lru), (Lfu(8), lfu), (Belady(trace), belady)):
        assert hit_rate(replay(trace, policy, num_slots)[60:]) == pytest.approx(expected, abs=0.01)


def test_the_residency_without_ram_hits_exactly_as_the_replay_says() -> None:
    trace = load_trace(KIMI)
    trace = Trace(trace.name, trace.num_experts, trace.is_ranked, trace.picks[:60])
    residency = Residency({"fp4": PoolSizes(vram=700)}, decay_tokens=16)
    misses: list[ExpertKey] = []
    for waves in trace.tokens():
        for keys in waves:
            wave = [("fp4", key) for key in keys]
            for key in keys:
                residency.use(key, ["fp4"])
            moves = residency.acquire(wave)
            misses += [move.key for move in moves if isinstance(move, Read)]
            for move in moves:
                if isinstance(move, Read):
                    residency.arrived("fp4", move.key)
            residency.release(wave)
        residency.end_token()
    uses = sum(token_uses for _, token_uses in replay(trace, Lfu(16), 700))
    assert uses - len(misses) == hits(trace, Lfu(16), 700)
    residency.check_balance()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"tok": 0}\n'),
        ("a.jsonl", "not json\n"),
        ("a.jsonl", ""),
        ("a.csv", "turn,phase\n0,0\n"),
        ("a.csv", "turn,phase,step,layer,slot,expert,weight\n0,0,0,0,1,3,0.5\n"),
        ("a.txt", "x"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(StrawError, match=name):
        load_trace(tmp_path / name)


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"layers": [[1, 2]]}\n' * 1000)[:-20])
    with pytest.raises(StrawError, match="damaged"):
        load_trace(tmp_path / "a.jsonl.xz")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"layers": [[0, 1], [2, 3]]}\n' * 3)
    assert main([str(tmp_path / "a.jsonl"), "--slots", "4", "--decay", "2"]) == 0
    output = capsys.readouterr()
    assert '"slots": 4, "share": 0.5' in output.out
    assert '"cold": {"lru": 0.6667, "lfu_2": 0.6667, "lfu_never": 0.6667, "belady": 0.6667}' in output.out
    assert "3 tokens, 2 layers x 4 experts" in output.err
    assert main([str(tmp_path / "b.jsonl")]) == 1


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A directory of `prep trace`: 7 tokens in shards of 4, 2 layers of 3 picks; token t picks t, t + 1 and t + 5 of 12."""
    record = TraceRecord(TraceShape(8, 12, 2, 3), "fp", False, 4, {}, 7, (Document("d", 0, 7),), done=True)
    ids = (torch.arange(7)[:, None] + torch.tensor([0, 1, 5])).to(torch.int16).expand(2, 7, 3)
    for start, count in record.shards():
        rows = slice(start, start + count)
        parts = {"weights": torch.ones(2, count, 3), "token_ids": torch.arange(7)[rows].int(), "ids": ids[:, rows]}
        write_shard(tmp_path, record, start, parts)
    write_record(tmp_path, record)
    return tmp_path


def test_a_trace_of_our_own(recorded: Path) -> None:
    trace = load_trace(recorded)
    assert (trace.num_layers, trace.num_experts, trace.is_ranked) == (2, 12, True)
    assert trace.picks == [[[t, t + 1, t + 5]] * 2 for t in range(7)]
    assert hits(trace, Lru(), 6) == 2 * 6  # one of three is the token's before, in each layer
    assert from_recorded(Recorded.open(recorded), 5).picks == trace.picks[:5]


def test_a_damaged_trace_of_our_own_is_one_line(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recorded), "--slots", "6"]) == 0
    assert "7 tokens, 2 layers x 12 experts" in capsys.readouterr().err
    (recorded / "shard-00001.safetensors").unlink()
    assert main([str(recorded), "--slots", "6"]) == 1
    assert "shard-00001.safetensors: cannot be read" in capsys.readouterr().err
