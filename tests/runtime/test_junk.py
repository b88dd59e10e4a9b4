"""Junk in token ids: planted loops are found in time and where they begin, clean text raises no alarm."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice, repeat
from pathlib import Path

import pytest
from clean_text import hardest_files, installed_files, read, tables_and_lists
from tokenizers import Tokenizer

from runtime.errors import StrawError
from runtime.junk import Finding, JunkDetector, Kind, audit
from runtime.junk_rules import JunkRules, token_classes
from runtime.tokenizer import encode

DEMO = Path(__file__).parents[2] / "artifacts/demo"
WINDOW, STRIDE = 192, 16  # the guard's memory and the distance of its snapshots
WINDOWS = 30_000
PLAIN = JunkRules()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "checkpoint/tokenizer.json"))


@cache
def rules() -> JunkRules:
    classes = token_classes(tokenizer())
    return JunkRules(filler_ids=classes.filler_ids, newline_ids=classes.newline_ids)


@cache
def prose() -> list[int]:
    """Clean text without lines and fillers, such that positions are simple to reason about."""
    texts = (json.loads(line)["text"] for line in (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines())
    unwanted = rules().filler_ids | rules().newline_ids
    return [token_id for text in texts for token_id in encode(tokenizer(), text) if token_id not in unwanted]


def _ids(path: Path) -> list[int]:
    return encode(tokenizer(), read(path))


def plant(period: int, variation: str, seed: int) -> tuple[list[int], int]:
    """Clean text with a loop at a random place, and that place; the loop ends 64 tokens after its second copy."""
    rng = random.Random(f"{period} {variation} {seed}")
    before = rng.randrange(0, 400)
    start = rng.randrange(len(prose()) - 1000)
    clean, copy = prose()[start : start + before], prose()[start + 500 : start + 500 + period]
    loop = [copy[n % period] for n in range(2 * period + 64)]
    if variation == "replaced":
        for block in range(0, len(loop), 12):
            loop[min(len(loop) - 1, block + rng.randrange(12))] = rng.choice(prose())
    if variation == "counter":
        # More often than once in 12 tokens would make short periods the counting that a list of numbers is.
        every, column = period * -(-12 // period), rng.randrange(period)
        for number, place in enumerate(range(column, len(loop), every)):
            loop[place] = encode(tokenizer(), str(number))[-1]
    return clean + loop, before


@pytest.mark.parametrize("period", [1, 3, 17, 40])
@pytest.mark.parametrize("variation", ["none", "replaced", "counter"])
def test_planted_loop_is_found_in_time_and_where_it_began(period: int, variation: str) -> None:
    for seed in range(30):
        ids, begin = plant(period, variation, seed)
        found = audit(ids, rules())
        assert [finding.kind for finding in found] == [Kind.LOOP], (seed, begin, found)
        assert begin - period - 32 <= found[0].began <= begin + period, (seed, begin, found)


@pytest.mark.parametrize("period", [2, 64, 100, 128])
def test_longer_loop_without_variations_too(period: int) -> None:
    for seed in range(10):
        ids, begin = plant(period, "none", seed)
        found = audit(ids, rules())
        assert [finding.kind for finding in found] == [Kind.LOOP], (seed, begin, found)
        assert begin - period - 32 <= found[0].began <= begin + period, (seed, begin, found)


@pytest.mark.parametrize("period", [2, 3, 17, 40, 64, 100, 128])
def test_lines_that_are_all_alike_are_found_as_soon(period: int) -> None:
    newline = encode(tokenizer(), "the end.\n")[-1]
    assert newline in rules().newline_ids
    for seed in range(10):
        ids, begin = plant(period, "none", seed)
        ids[begin + period - 1 :: period] = [newline] * len(ids[begin + period - 1 :: period])
        found = audit(ids, rules())
        assert [finding.kind for finding in found] == [Kind.LOOP], (seed, begin, found)
        assert begin - period - 32 <= found[0].began <= begin + period, (seed, begin, found)


@pytest.mark.parametrize(("period", "late"), [(3, 128), (17, 160), (40, 192), (128, 512)])
def test_lines_of_which_one_token_in_fifty_varies_are_found_later(period: int, late: int) -> None:
    """So many tokens after the second copy; nearer than that, tables and lists look the same."""
    for seed in range(5):
        rng = random.Random(f"{period} {seed}")
        line = [*rng.sample(range(2000, 3000), period - 1), encode(tokenizer(), "the end.\n")[-1]]
        loop = [rng.choice(prose()) if rng.random() < 0.02 else line[n % period] for n in range(2 * period + late)]
        found = audit(prose()[:100] + loop, rules())
        assert Kind.LOOP in [finding.kind for finding in found], (seed, found)


def lines(copies: int, numbered: bool) -> list[int]:
    line = encode(tokenizer(), " The answer to the question is the same and it has been given before.\n")
    return [token_id for n in range(copies) for token_id in (3000 + n if numbered else 3000, *line)]


def test_a_loop_of_lines_needs_more_than_four_copies_and_one_with_a_column_many_more() -> None:
    period = len(lines(1, False))
    assert audit(lines(4, False), rules()) == []
    assert [finding.kind for finding in audit(lines((period + 64) // period + 2, False), rules())] == [Kind.LOOP]
    assert audit(lines(1000 // period, True), rules()) == []
    found = audit(lines(1024 // period + 2, True), rules())
    assert [(finding.kind, finding.began) for finding in found] == [(Kind.LOOP, 0)]


def test_two_words_in_random_order_are_found_by_their_trigrams() -> None:
    rng = random.Random(0)
    junk = [rng.choice((7001, 7002)) for _ in range(210)]
    found = audit(prose()[:300] + junk, replace(rules(), loop_tokens=10_000))
    assert [finding.kind for finding in found] == [Kind.TRIGRAMS]
    assert 300 - 32 <= found[0].began <= 300


def test_a_run_of_fillers_counts_as_one_token_until_it_is_longer_than_any_ruler() -> None:
    with_filler = JunkRules(filler_ids=frozenset({5}))
    assert audit([5] * 255, with_filler) == []
    assert audit([1, 2, *repeat(5, 256)], with_filler) == [
        Finding(Kind.LOOP, "one token 256 times from token 2 on", began=2)
    ]
    assert len(audit([5] * 255, PLAIN)) == 1


def test_patterns_and_misplaced_tokens_are_found_where_they_begin() -> None:
    with_patterns = JunkRules(misplaced_ids=frozenset({90}), patterns=((3, 4, 5),))
    found = audit([1, 3, 4, 3, 4, 5, 90, 4, 5], with_patterns)
    assert [(finding.kind, finding.began) for finding in found] == [(Kind.PATTERN, 3), (Kind.PATTERN, 6)]


def test_a_loop_is_one_finding_and_a_second_loop_another() -> None:
    ids = prose()[:200] + [7001, 7002, 7003] * 200 + prose()[200:400] + [7004] * 200
    began = [finding.began for finding in audit(ids, rules())]
    assert len(began) == 2
    assert 160 <= began[0] <= 203
    assert 960 <= began[1] <= 1001


@pytest.mark.parametrize("num_tokens", [0, 150, 390, 400])
def test_after_truncate_all_is_as_if_no_more_had_been_read(num_tokens: int) -> None:
    ids, _ = plant(17, "replaced", 3)
    ids = prose()[:390] + ids
    detector = JunkDetector(rules())
    for token_id in prose()[:390] + [7001] * 100:
        detector.push(token_id)
    detector.truncate(num_tokens)
    fresh = JunkDetector(rules())
    for token_id in (prose()[:390] + [7001] * 100)[:num_tokens]:
        fresh.push(token_id)
    after = [detector.push(token_id) for token_id in ids]
    assert after == [fresh.push(token_id) for token_id in ids]
    assert any(after)


def test_truncate_cannot_lengthen() -> None:
    with pytest.raises(ValueError, match="got 1, expected 0 to 0"):
        JunkDetector(PLAIN).truncate(1)


@pytest.mark.parametrize("wrong", [JunkRules(patterns=((),)), JunkRules(texts=(b"",)), JunkRules(trigram_window=0)])
def test_rules_that_cannot_be_applied(wrong: JunkRules) -> None:
    with pytest.raises(StrawError, match="expected"):
        JunkDetector(wrong)


def count_windows(texts: Iterator[list[int]], step: int, enough: int) -> int:
    """Windows of 192 tokens, `step` apart, of which none has a finding (nor has the text around them)."""
    windows = 0
    for ids in texts:
        found = audit(ids, rules())
        assert not found, (found, tokenizer().decode(ids[found[0].began :][:200]))
        windows += max(0, len(ids) - WINDOW) // step + 1
        if windows >= enough:
            break
    return windows


@pytest.mark.slow
def test_no_false_alarm_in_tables_lists_and_the_hardest_code() -> None:
    texts = [encode(tokenizer(), text) for text in tables_and_lists()] + [_ids(path) for path in hardest_files()]
    sample = islice(installed_files(), None, None, 200)
    assert count_windows(iter(texts), STRIDE, WINDOWS) + count_windows(map(_ids, sample), STRIDE, WINDOWS) > 20_000


@pytest.mark.slow
@pytest.mark.timeout(900)  # six million tokens: three minutes on a core of its own
def test_no_false_alarm_in_all_that_is_installed() -> None:
    assert count_windows(map(_ids, installed_files()), WINDOW, WINDOWS) >= WINDOWS
