"""Offline residency: what the ladder finds resident is said by a rule, so that quality is measured apart from caching.

Owns the rules and the store that asks them; the ladder, the arithmetic and the moves are `runtime.store`'s. Whatever a pick is
served with is fetched through the real pools, which are working memory here and decide nothing. So whole chunks of a prefill
can be measured, on a model of any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from runtime.errors import StrawError
from runtime.expert_weights import ExpertWeights
from runtime.ladder import AnyLadder, Rung
from runtime.store.policies import ExpertKey
from runtime.store.pools import Layout, Slots, parse_slots, pool_sizes
from runtime.store.residency import PoolSizes, Read, Residency
from runtime.store.store import TieredStore, Work

COLD, WARM = "cold", "warm"  # the real pools: empty, or as a first pass over the same tokens has left them
SHARES = {"none": 0.0, "all": 1.0}
RANDOM, REPLAY = "random:", "replay:"
READ = "read "  # before a plane's name, among the counters


@dataclass(frozen=True, slots=True)
class ResidencyForm:
    """What `--residency` spells: real pools, a share of the experts at FP4, or the slots of pools that are played along."""

    text: str
    share: float | None = None
    slots: Slots | None = None

    @property
    def is_offline(self) -> bool:
        """Whether a rule answers, and not the real pools."""
        return self.text not in (COLD, WARM)


def parse_residency(text: str) -> ResidencyForm:
    """The form of `none`, `all`, `random:SHARE`, `replay:F,R,f,r`, `cold` or `warm`.

    Raises:
        StrawError: It is none of these.
    """
    if text in (COLD, WARM):
        return ResidencyForm(text)
    if text in SHARES:
        return ResidencyForm(text, share=SHARES[text])
    if text.startswith(REPLAY):
        return ResidencyForm(text, slots=_replay_slots(text))
    try:
        share = float(text.removeprefix(RANDOM)) if text.startswith(RANDOM) else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise StrawError(
            f"--residency {text}: expected none, all, random:SHARE with a share of 0 to 1, replay:F,R,f,r, cold or warm, e.g. --residency replay:1050,1250,100,500"
        )
    return ResidencyForm(text, share=share)


def _replay_slots(text: str) -> Slots | None:
    try:
        return parse_slots(text.removeprefix(REPLAY))
    except StrawError:
        raise StrawError(
            f"--residency {text[:60]}: expected four counts F,R,f,r (FP4 in VRAM, in RAM, 2-bit only in VRAM, in RAM), e.g. --residency replay:1050,1250,100,500"
        ) from None


def check_replay(slots: Slots, ladder: AnyLadder, num_picks: int, num_layers: int, is_split: bool) -> None:
    """Nothing, if each layer can have a slot for every precision that the ladder may demand; under SPLIT FP4 brings its 2-bit.

    Raises:
        StrawError: It cannot.
    """
    fp4, two_bit = slots.fp4_vram + slots.fp4_ram, slots.two_bit_vram + slots.two_bit_ram
    found = {"FP4": fp4} if ladder.needs_fp4(num_picks) else {}
    if not ladder.is_exact(num_picks) and ladder.needs_two_bit(num_picks):
        found["2-bit"] = two_bit + (fp4 if is_split else 0)
    for name, count in found.items():
        if count < num_layers:
            raise StrawError(
                f"--residency replay: {count} slots for {name}, expected at least {num_layers}, one a layer; raise them or choose another --ladder"
            )


class Rule(Protocol):
    """Says what is resident; hears what was served. One sequence at a time, its tokens in order within each layer."""

    reads: Counter[str]  # slabs by plane that were not resident when served; empty where the rule knows no pools

    def begin(self) -> None:
        """A new sequence, on which no earlier one has a bearing."""

    def is_resident(self, rung: Rung, key: ExpertKey) -> bool:
        """Whether the expert is resident at this precision, which the model has."""
        ...

    def served(self, layer_idx: int, work: Sequence[Work]) -> None:
        """One more token has been served in this layer."""


class FixedShare:
    """A share of all experts is resident at both precisions, always the same ones: those whose hash with the seed is small."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.reads: Counter[str] = Counter()
        self._share, self._seed = share, seed
        self._draws: dict[ExpertKey, float] = {}

    def begin(self) -> None:
        """Nothing to forget."""

    def is_resident(self, rung: Rung, key: ExpertKey) -> bool:
        """Whether the key's draw, uniform in [0, 1), lies below the share."""
        if key not in self._draws:
            digest = blake2b(f"{self._seed}:{key.layer_idx}:{key.expert_id}".encode(), digest_size=8).digest()
            self._draws[key] = int.from_bytes(digest) / 2**64
        return self._draws[key] < self._share

    def served(self, layer_idx: int, work: Sequence[Work]) -> None:
        """Changes nothing."""


class ShadowTiers:
    """What pools of F,R,f,r slots would hold: each layer has its own share of them and plays its tokens in order.

    Two approximations. In a chunk all tokens of a layer come before the next layer, while the real pools see all layers of a
    token: so the slots, which layers compete for there, are dealt out evenly here. And VRAM and RAM are one pool, which is what
    both together hold, since what leaves for NVMe is the coldest of both; but in the real pools a slab on its way up still keeps
    its RAM slot, so that a few slots stand empty, and a residual waits for its base. Counts begin at zero, without the model's
    heat.
    """

    def __init__(self, slots: Slots, weights: ExpertWeights, ladder: AnyLadder) -> None:
        """Deals out the slots, of which there must be enough (`check_replay`)."""
        self.reads: Counter[str] = Counter()
        self._weights, self._num_layers = weights, weights.config.num_hidden_layers
        num_picks = weights.config.num_experts_per_tok
        two_bit = () if ladder.is_exact(num_picks) else weights.planes(Rung.TWO_BIT)
        layout = Layout(weights.planes(Rung.FP4), two_bit, {})
        joined = Slots(slots.fp4_vram + slots.fp4_ram, 0, slots.two_bit_vram + slots.two_bit_ram, 0)
        self._slots = {plane: pool.vram for plane, pool in pool_sizes(joined, layout, staging=0).items()}
        self.begin()

    def begin(self) -> None:
        """Empty pools."""
        self._tiers = [Residency(self._share(layer_idx)) for layer_idx in range(self._num_layers)]

    def is_resident(self, rung: Rung, key: ExpertKey) -> bool:
        """As `Residency.is_resident`."""
        tiers, planes = self._tiers[key.layer_idx], self._weights.planes(rung)
        return tiers.has_pools(planes) and tiers.is_resident(planes, key)

    def served(self, layer_idx: int, work: Sequence[Work]) -> None:
        """The token's slabs are held, as many at once as there are slots, and the layer's token ends."""
        tiers = self._tiers[layer_idx]
        for item in work:
            tiers.use(item.key, self._weights.planes(item.rung))
        for wave in _waves(tiers, work):
            wants = dict.fromkeys(slab for item in wave for slab in item.slabs)
            for move in tiers.acquire(wants):
                if isinstance(move, Read):
                    self.reads[move.plane] += 1
                    tiers.arrived(move.plane, move.key)
            tiers.release(wants)
        tiers.end_token()

    def _share(self, layer_idx: int) -> dict[str, PoolSizes]:
        """The layer's slots by plane; those of all layers add up."""
        return {
            plane: PoolSizes(total * (layer_idx + 1) // self._num_layers - total * layer_idx // self._num_layers)
            for plane, total in self._slots.items()
        }


def _waves(tiers: Residency, work: Sequence[Work]) -> Iterator[Sequence[Work]]:
    """All of it if it fits at once, else one expert after the other, those that are held first."""
    if tiers.can_acquire(slab for item in work for slab in item.slabs):
        yield work
    else:
        yield from ([item] for item in sorted(work, key=lambda item: not _is_held(tiers, item)))


def _is_held(tiers: Residency, item: Work) -> bool:
    return tiers.is_resident([plane for plane, _ in item.slabs], item.key)


class RuledStore(TieredStore):
    """A store whose ladder is told by a rule what is resident; for measurements of whole chunks."""

    rule: Rule

    @classmethod
    def over(cls, store: TieredStore, ladder: AnyLadder, rule: Rule) -> RuledStore:
        """A store on the slots and the reads of `store`, which must have pools for every precision and is not to be used again."""
        parts = store._weights, store._new_residency, store._memory, store._files, ladder, store._watch
        ruled = cls(*parts, clock=store._clock)
        ruled.rule = rule
        return ruled

    def _is_resident(self, rung: Rung, key: ExpertKey) -> bool:
        return bool(self._weights.planes(rung)) and self.rule.is_resident(rung, key)

    def _plan(self, layer_idx: int, ids: list[list[int]], weights: list[list[float]]) -> list[Work]:
        """As of the store, but one token after the other: the rule hears what each was served with before the next is decided."""
        work: dict[tuple[ExpertKey, Rung], Work] = {}
        for token, (token_ids, token_weights) in enumerate(zip(ids, weights, strict=True)):
            own = super()._plan(layer_idx, [token_ids], [token_weights])
            self.rule.served(layer_idx, own)
            for item in own:
                whole = work.setdefault((item.key, item.rung), Work(item.key, item.rung, item.slabs))
                for rank, weight in zip(item.ranks, item.weights, strict=True):
                    whole.add(token, rank, weight)
        return list(work.values())


def new_rule(form: ResidencyForm, store: TieredStore, ladder: AnyLadder, seed: int) -> Rule:
    """The rule of an offline form for this store's model."""
    if form.slots is not None:
        return ShadowTiers(form.slots, store._weights, ladder)
    assert form.share is not None, form
    return FixedShare(form.share, seed)


def traffic(store: TieredStore) -> Counter[str]:
    """What the store has served and read: picks by rung (`FP4`, `2-bit`, `dropped`) and slabs as `read PLANE`.

    Under a rule the reads are those that the rule's pools would have needed.
    """
    stats = store.stats.as_dict()
    counts: Counter[str] = Counter()
    for uses in stats["by_layer"].values():
        for name, count in uses.items():
            counts[name.split()[0]] += count
    reads = store.rule.reads if isinstance(store, RuledStore) else _reads(stats["by_plane"])
    return counts + Counter({READ + plane: count for plane, count in reads.items()})


def _reads(by_plane: dict[str, dict[str, int]]) -> Counter[str]:
    return Counter({plane: counts.get("read", 0) for plane, counts in by_plane.items()})
