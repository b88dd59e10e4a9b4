"""Greedy and seeded sampling against softmax, the borders of top_p, and generation_config.json."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ArtifactError
from runtime.sampler import Sampler, SamplingDefaults

INF = float("inf")
NUM_DRAWS = 4_000
FREQUENCY_TOLERANCE = 0.032  # four sigma of the frequency of an even event in so many draws


def logits_of(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def draw(sampler, logits, count):
    return [sampler(logits) for _ in range(count)]


def test_greedy_takes_the_largest_and_the_first_of_equals():
    sampler = Sampler()
    assert sampler(torch.tensor([0.0, 3.0, -1.0])) == 1
    assert sampler(torch.tensor([1.0, 3.0, 3.0, 3.0])) == 1
    assert sampler(torch.tensor([-INF, -5.0])) == 1
    assert sampler(torch.full((129_280,), 0.25)) == 0


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.999999)])
def test_frequencies_follow_softmax(temperature, top_p):
    logits = torch.tensor([1.5, -0.5, 0.3, 0.9, -2.0])
    counts = torch.tensor(draw(Sampler(temperature, top_p, seed=7), logits, NUM_DRAWS)).bincount(minlength=5)
    error = (counts / NUM_DRAWS - (logits / temperature).softmax(0)).abs().max()
    assert error < FREQUENCY_TOLERANCE


def test_the_frequency_test_is_not_blind():
    logits = torch.tensor([1.5, -0.5, 0.3, 0.9, -2.0])
    counts = torch.tensor(draw(Sampler(1.5, seed=7), logits, NUM_DRAWS)).bincount(minlength=5)
    assert (counts / NUM_DRAWS - logits.softmax(0)).abs().max() > FREQUENCY_TOLERANCE


def test_frequencies_within_top_p_are_renormalised():
    logits = logits_of(0.1, 0.5, 0.1, 0.3)
    counts = torch.tensor(draw(Sampler(1.0, 0.7, seed=3), logits, NUM_DRAWS)).bincount(minlength=4) / NUM_DRAWS
    assert (counts - torch.tensor([0.0, 0.625, 0.0, 0.375])).abs().max() < FREQUENCY_TOLERANCE


# (top_p, ids that may come) for probabilities 1/4, 1/8, 1/2, 1/8; 1e-9 is far above the rounding of their sums
TOP_P = [
    (1e-9, {2}),
    (0.5 - 1e-9, {2}),
    (0.5 + 1e-9, {2, 0}),
    (0.75 - 1e-9, {2, 0}),
    (0.75 + 1e-9, {2, 0, 1}),
    (0.875 - 1e-9, {2, 0, 1}),
    (0.875 + 1e-9, {2, 0, 1, 3}),
    (1.0, {2, 0, 1, 3}),
]


@pytest.mark.parametrize(("top_p", "ids"), TOP_P)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, ids):
    powers_of_two = torch.tensor([-2.0, -3.0, -1.0, -3.0])
    assert set(draw(Sampler(1 / math.log(2), top_p), powers_of_two, 500)) == ids


# Eight equal logits have probabilities of exactly 1/8, so a top_p of n/8 is reached with equality, by the smallest ids.
@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.125, 1), (0.25, 2), (0.3, 3), (0.5, 4), (0.875, 7), (0.876, 8), (1.0, 8)]
)
def test_top_p_among_equals_keeps_the_smallest_ids(top_p, num_kept):
    assert set(draw(Sampler(1.0, top_p), torch.zeros(8), 500)) == set(range(num_kept))


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    st.floats(1e-6, 1.0),
    st.floats(0.05, 5.0),
    st.integers(0, 2**63 - 1),
)
@settings(deadline=None)
def test_what_is_drawn_is_never_outside_the_smallest_set(values, top_p, temperature, seed):
    logits = torch.tensor(values, dtype=torch.float32)
    token_id = Sampler(temperature, top_p, seed)(logits)
    probabilities = (logits.double() / temperature).softmax(0)
    more_probable = float(probabilities[probabilities > probabilities[token_id]].sum())
    assert more_probable < top_p + 1e-9


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.5, 3.0, 10.0])
def test_the_set_equals_that_of_a_full_sort(top_p, spread):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(4)) * spread
    ordered, ids = logits.double().softmax(0).sort(descending=True)
    num_kept = int((ordered.cumsum(0) < top_p).sum()) + 1
    kept = set(ids[:num_kept].tolist())
    drawn = set(draw(Sampler(1.0, top_p, seed=2), logits, 1000))
    assert drawn <= kept
    assert len(drawn) >= min(num_kept, 20) / 2


def test_excluded_tokens_never_come():
    logits = torch.tensor([-INF, 0.0, -INF, 0.0, -INF])
    for top_p in (1.0, 0.9):
        assert set(draw(Sampler(1.0, top_p), logits, 300)) == {1, 3}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_excluded_tokens_never_come_even_at_the_smallest_draw(monkeypatch, top_p):
    monkeypatch.setattr(torch, "rand", lambda size, **options: torch.zeros(size, dtype=torch.float64))
    assert Sampler(1.0, top_p)(torch.tensor([-INF, -INF, 0.0])) == 2


def test_a_tiny_temperature_is_greedy():
    assert set(draw(Sampler(1e-308), torch.tensor([0.0, 88.0, 87.9]), 50)) == {1}


def test_a_huge_temperature_is_even():
    assert set(draw(Sampler(1e300), torch.tensor([0.0, 88.0, -88.0]), 200)) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_same_seed_gives_the_same_tokens(top_p):
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    first, again, other = (draw(Sampler(1.0, top_p, seed), logits, 50) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_torchs_global_generator_is_left_alone():
    logits = torch.zeros(100)
    torch.manual_seed(1)
    first = draw(Sampler(1.0), logits, 20)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert draw(Sampler(1.0), logits, 20) == first
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_logits_are_not_modified():
    logits = torch.tensor([0.5, 0.25, 2.0])
    Sampler(0.7, 0.8)(logits)
    assert logits.tolist() == [0.5, 0.25, 2.0]


def test_a_full_vocabulary_reaches_its_last_token():
    logits = torch.full((129_280,), -30.0)
    logits[-1] = 0.0
    assert Sampler(1.0, seed=1)(logits) == 129_279


BAD_LOGITS = [
    torch.tensor([0.0, float("nan"), 1.0]),
    torch.tensor([float("nan"), INF]),
    torch.tensor([0.0, INF]),
    torch.tensor([-INF, -INF]),
    torch.empty(0),
    torch.zeros(1, 4),
    torch.zeros(4, dtype=torch.bfloat16),
    torch.zeros(4, dtype=torch.float64),
]


@pytest.mark.parametrize("logits", BAD_LOGITS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_refused(logits, temperature):
    with pytest.raises(ValueError, match="expected"):
        Sampler(temperature)(logits)


BAD_ARGUMENTS = [
    ({"temperature": -0.1}, "temperature is -0.1, expected a finite number of at least 0"),
    ({"temperature": INF}, "temperature is inf, expected"),
    ({"temperature": float("nan")}, "temperature is nan, expected"),
    ({"temperature": "1"}, "temperature is '1', expected"),
    ({"top_p": 0.0}, "top_p is 0.0, expected a number above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p is 1.01, expected"),
    ({"top_p": float("nan")}, "top_p is nan, expected"),
    ({"seed": -1}, "seed is -1, expected an integer"),
    ({"seed": 2**63}, "seed is 9223372036854775808, expected"),
    ({"seed": 0.5}, "seed is 0.5, expected"),
]


@pytest.mark.parametrize(("arguments", "error"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        Sampler(**arguments)


# (content of generation_config.json, temperature, top_p)
CONFIGS = [
    ({"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}, 1.0, 1.0),
    ({"temperature": 0.7}, 0.7, 1.0),
    ({"top_p": 0.95, "temperature": 1}, 1.0, 0.95),
    ({"do_sample": False, "temperature": 0.7}, 0.0, 1.0),
    ({"temperature": None, "top_p": None, "do_sample": None}, 1.0, 1.0),
    ({}, 1.0, 1.0),
]


@pytest.mark.parametrize(("content", "temperature", "top_p"), CONFIGS)
def test_defaults_from_a_file(tmp_path, content, temperature, top_p):
    (tmp_path / "generation_config.json").write_text(json.dumps(content), encoding="utf-8")
    assert SamplingDefaults.from_directory(tmp_path) == SamplingDefaults(temperature, top_p)


def test_defaults_without_a_file(tmp_path):
    assert SamplingDefaults.from_directory(tmp_path) == SamplingDefaults(1.0, 1.0)


BAD_CONFIGS = [
    (b'{"temperature": 1.0', "not readable as JSON"),
    (b"\xff\xfe", "not readable as JSON"),
    (b"", "not readable as JSON"),
    (b"[1]", "a JSON list, expected an object"),
    (b'{"temperature": -1}', "temperature is -1, expected a finite number"),
    (b'{"temperature": NaN}', "temperature is nan, expected"),
    (b'{"temperature": true}', "temperature is True, expected"),
    (b'{"temperature": 1%s}' % (b"0" * 400), "temperature is 1000"),
    (b'{"top_p": 0}', "top_p is 0, expected a number above 0"),
    (b'{"top_p": "1.0"}', "top_p is '1.0', expected"),
    (b'{"do_sample": 1}', "do_sample is 1, expected true or false"),
]


@pytest.mark.parametrize(("content", "error"), BAD_CONFIGS)
def test_a_damaged_file_is_one_line(tmp_path, content, error):
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=error) as caught:
        SamplingDefaults.from_directory(tmp_path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_directory_in_its_place_is_one_line(tmp_path):
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ArtifactError, match="not readable as JSON"):
        SamplingDefaults.from_directory(tmp_path)
