"""Offline residency: each rule against what it stands for, all experts at one precision or the real pools."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from torch import Tensor

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.engine import Session
from runtime.errors import StrawError
from runtime.eval_rows import BOTH_PRECISIONS
from runtime.evaluation import forward_all, forward_under
from runtime.ladder import Rung, parse_ladder
from runtime.resident import FP4, TWO_BIT, ResidentExperts
from runtime.ruled_store import FixedShare, RuledStore, ShadowTiers, check_replay, new_rule, parse_residency
from runtime.store.policies import ExpertKey
from runtime.store.pools import Slots
from runtime.store.residency import Residency
from runtime.store.store import TieredStore

CODES = ("int2", "split")
NUM_EXPERTS, NUM_PICKS, NUM_LAYERS = 8, 3, 3
TOKENS = torch.randint(2, 512, (30,), generator=torch.Generator().manual_seed(5)).tolist()


def build(root: Path, num_layers: int, codecs: tuple[str, ...], num_experts: int = NUM_EXPERTS) -> Path:
    write_random_checkpoint(
        root / "checkpoint",
        compress_ratios=[0] * (num_layers + 1),
        hidden_size=128,
        n_routed_experts=num_experts,
        num_experts_per_tok=NUM_PICKS,
        num_hash_layers=min(1, num_layers - 1),
        num_hidden_layers=num_layers,
    )
    layout(root / "checkpoint", root / "model")
    for codec in codecs:
        requant(root / "model", codec)
    return root / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("ruled"), NUM_LAYERS, ("clip", "split"))


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("one"), 1, ("clip", "split"), num_experts=24)


def ruled(directory: Path, code: str, ladder: str, residency: str, seed: int = 0) -> Session:
    """A session on the store that a rule decides for."""
    session = open_model(directory, code=code, ladder=BOTH_PRECISIONS, context=128)
    store, parsed = session._experts, parse_ladder(ladder, NUM_PICKS)
    assert isinstance(store, TieredStore)
    session._experts = RuledStore.over(store, parsed, new_rule(parse_residency(residency), store, parsed, seed))
    return session


def run(session: Session, residency: str) -> tuple[Tensor, Counter[str]]:
    return forward_under(session, parse_residency(residency), TOKENS)


def resident(directory: Path, code: str, precision: str) -> Tensor:
    """The hidden states with every expert at one precision, and no store at all."""
    session = open_model(directory, code=code, context=128)
    with ModelDirectory(directory) as source:
        session._experts = ResidentExperts(
            source, torch.float32, torch.device("cpu"), False, precision=precision, code=code
        )
    return forward_all(session, TOKENS)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("ladder", ["exact", "1,2", "0,0"])
def test_all_resident_is_exact_at_any_ladder(model: Path, code: str, ladder: str) -> None:
    hidden, counts = run(ruled(model, code, ladder, "all"), "all")
    assert torch.equal(hidden, resident(model, code, FP4))
    assert counts == {"FP4": len(TOKENS) * NUM_LAYERS * NUM_PICKS}


@pytest.mark.parametrize("code", CODES)
def test_none_resident_without_a_is_two_bit_everywhere(model: Path, code: str) -> None:
    hidden, counts = run(ruled(model, code, f"0,{NUM_PICKS}", "none"), "none")
    expected = resident(model, code, TWO_BIT)
    assert torch.equal(hidden, expected)
    assert not torch.equal(hidden, resident(model, code, FP4))
    assert counts == {"2-bit": len(TOKENS) * NUM_LAYERS * NUM_PICKS}


def test_none_resident_drops_all_but_the_best(model: Path) -> None:
    _, counts = run(ruled(model, "int2", "0,0", "none"), "none")
    uses = len(TOKENS) * NUM_LAYERS
    assert counts == {"2-bit": uses, "dropped": uses * (NUM_PICKS - 1)}


def test_a_chunk_is_decided_as_its_tokens_are(model: Path) -> None:
    """Token by token the same picks are served alike, so a chunk's traffic is that of its tokens."""
    form = "replay:9,3,3,3"
    session = ruled(model, "int2", "1,2", form)
    _, chunk = run(session, form)
    store = session._experts
    assert isinstance(store, RuledStore)
    before = store.rule.reads.copy()
    store.rule.begin()
    forward_all(session, TOKENS, one_by_one=True)
    assert store.rule.reads - before == Counter({name[5:]: n for name, n in chunk.items() if name.startswith("read ")})


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_random_share_is_that_share(share: float) -> None:
    keys = [ExpertKey(layer, expert) for layer in range(43) for expert in range(256)]
    rule, again, other = FixedShare(share, seed=1), FixedShare(share, seed=1), FixedShare(share, seed=2)
    held = [rule.is_resident(Rung.FP4, key) for key in keys]
    deviation = (share * (1 - share) / len(keys)) ** 0.5
    assert abs(sum(held) / len(keys) - share) <= 4 * deviation
    assert held == [again.is_resident(Rung.TWO_BIT, key) for key in keys]
    assert (held == [other.is_resident(Rung.FP4, key) for key in keys]) == (share in (0, 1))


def test_a_larger_share_holds_what_a_smaller_one_does() -> None:
    keys = [ExpertKey(0, expert) for expert in range(256)]
    few, many = ({key for key in keys if FixedShare(share).is_resident(Rung.FP4, key)} for share in (0.2, 0.5))
    assert few < many


@pytest.mark.parametrize(("code", "ladder"), [("int2", "1,2"), ("int2", "0,1"), ("split", "exact")])
def test_one_layers_shadow_is_the_real_pools(one_layer: Path, code: str, ladder: str) -> None:
    """With one layer nothing is dealt out: without RAM the same picks are served alike, and the same slabs read."""
    slots = (NUM_PICKS + 6, 0, NUM_PICKS + 4, 0)
    real = open_model(one_layer, code=code, ladder=ladder, slots=slots, context=128)
    form = f"replay:{','.join(map(str, slots))}"
    expected, played = run(real, "cold")[1], run(ruled(one_layer, code, ladder, form), form)[1]
    assert expected == played
    assert any(name.startswith("read ") for name in played)


def test_the_pools_of_all_layers_add_up(model: Path) -> None:
    store = open_model(model, code="split", ladder=BOTH_PRECISIONS)._experts
    assert isinstance(store, TieredStore)
    shadow = ShadowTiers(Slots(7, 4, 2, 3), store._weights, parse_ladder("1,2", NUM_PICKS))
    held = [tiers.num_vram_slots(plane) for tiers in shadow._tiers for plane in ("base", "residual")]
    assert sum(held[0::2]) == 16 and sum(held[1::2]) == 11
    assert max(held[0::2]) - min(held[0::2]) <= 1


def test_the_accounts_of_every_shadow_balance(model: Path) -> None:
    form = "replay:4,2,1,3"
    session = ruled(model, "split", "1,2", form)
    run(session, form)
    store = session._experts
    assert isinstance(store, RuledStore) and isinstance(store.rule, ShadowTiers)
    for tiers in store.rule._tiers:
        assert isinstance(tiers, Residency)
        tiers.check_balance()


@pytest.mark.parametrize(
    "text", ["", "some", "random:", "random:x", "random:1.5", "random:nan", "replay:1,2,3", "replay:a,b,c,d"]
)
def test_what_spells_no_residency(text: str) -> None:
    with pytest.raises(StrawError, match=r"expected .*, e\.g\. --"):
        parse_residency(text)


@pytest.mark.parametrize(
    ("ladder", "slots", "is_split", "lacking"),
    [
        ("1,3", Slots(9, 0, 1, 1), False, "2 slots for 2-bit"),
        ("1,3", Slots(9, 0, 0, 0), True, None),
        ("exact", Slots(1, 1, 9, 9), False, "2 slots for FP4"),
        ("exact", Slots(2, 1, 0, 0), False, None),
        ("0,0", Slots(0, 0, 1, 2), False, None),
    ],
)
def test_a_slot_for_every_layer(ladder: str, slots: Slots, is_split: bool, lacking: str | None) -> None:
    parts = slots, parse_ladder(ladder, NUM_PICKS), NUM_PICKS, NUM_LAYERS, is_split
    if lacking is None:
        check_replay(*parts)
    else:
        with pytest.raises(StrawError, match=f"{lacking}, expected at least 3, one a layer"):
            check_replay(*parts)
