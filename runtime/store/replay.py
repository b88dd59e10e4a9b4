"""Hit rate against slots for a recorded trace: LRU, LFU with decay (the store's own counts) and Belady's optimum.

One tier, one pool of slots for all layers, keys (layer, expert), as the store has it. A layer's picks come at once: those that
are held are hits, the others take slots, and no pick of the layer makes room for another. Slots are empty at the start. A trace
is played once and never looped, which would turn first touches into hits. Owns the two foreign trace formats, while our own
is `predictor.traces`'; runs no model.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import lzma
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol, TextIO

import torch

from predictor import traces
from predictor.errors import PredictorError
from runtime.errors import StrawError
from runtime.store.policies import ColdestFirst, ExpertKey, UseCounts

SHARES = (0.03, 0.055, 0.11, 0.16, 0.22, 0.26, 0.33, 0.44, 0.60, 0.88)  # of all experts; those of the published curves
DECAYS = (4, 8, 12, 16, 24, 32, 64, 128)
NO_DECAY = 1 << 60
WARM_UP = 0.2  # of the tokens, left out of the second figure: there a pool that starts empty measures first touches
FURTHEST = 1 << 60


@dataclass(frozen=True, slots=True)
class Trace:
    """Routing of consecutive tokens: `picks[token][layer]` are expert ids, best first if `is_ranked`; empty where a layer was skipped."""

    name: str
    num_experts: int
    is_ranked: bool
    picks: list[list[list[int]]]

    @property
    def num_layers(self) -> int:
        """Layers with routed experts."""
        return max(map(len, self.picks))

    def tokens(self) -> Iterator[list[list[ExpertKey]]]:
        """Of each token the keys that its layer calls need, in the order of the calls."""
        for layers in self.picks:
            yield [[ExpertKey(layer_idx, expert_id) for expert_id in ids] for layer_idx, ids in enumerate(layers)]


def load_trace(path: Path) -> Trace:
    """The trace in a directory of `prep trace`, or in a file, plain or .xz.

    A file .jsonl is as of sqliteai/waste (unranked), .csv as of Helldez/BigMoeOnEdge (ranked).

    Raises:
        StrawError: Another file, or a damaged one.
        PredictorError: A directory that holds no finished trace, or a damaged one.
    """
    if path.is_dir():
        return from_recorded(traces.Trace.open(path))
    kind = path.with_suffix("").suffix if path.suffix == ".xz" else path.suffix
    readers: dict[str, Callable[[TextIO], list[list[list[int]]]]] = {".jsonl": _read_jsonl, ".csv": _read_csv}
    if kind not in readers or not path.is_file():
        raise StrawError(
            f"{path}: not a trace; expected a directory of prep trace, or a file .jsonl or .csv, which may be compressed to .xz"
        )
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            picks = readers[kind](file)
        num_experts = 1 + max(expert for layers in picks for experts in layers for expert in experts)
    except (ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise StrawError(f"{path}: damaged or another format ({error}); expected routing as in tests/traces") from error
    return Trace(path.name, num_experts, kind == ".csv", picks)


def from_recorded(trace: traces.Trace, most_tokens: int | None = None) -> Trace:
    """The routing of a trace of our own, ranked, or of its first `most_tokens` tokens."""
    num_tokens = trace.num_tokens if most_tokens is None else min(most_tokens, trace.num_tokens)
    picks = trace.ids(torch.arange(num_tokens)).tolist()
    return Trace(trace.directory.name, trace.shape.num_experts, True, picks)


def _read_jsonl(file: TextIO) -> list[list[list[int]]]:
    """One token a line, its layers' expert ids sorted by id."""
    return [json.loads(line)["layers"] for line in file]


def _read_csv(file: TextIO) -> list[list[list[int]]]:
    """One pick a row, a layer's in rank order; the steps of all phases are tokens, and prompt tokens may lack the last layer."""
    tokens: dict[tuple[int, int, int], list[list[int]]] = {}
    for row in csv.DictReader(file):
        layers = tokens.setdefault((int(row["turn"]), int(row["phase"]), int(row["step"])), [])
        layers += [[] for _ in range(int(row["layer"]) + 1 - len(layers))]
        if int(row["slot"]) != len(layers[int(row["layer"])]):
            raise ValueError(f"slot {row['slot']} out of order in {row}")
        layers[int(row["layer"])].append(int(row["expert"]))
    return [tokens[step] for step in sorted(tokens)]


class Policy(Protocol):
    """Who leaves a full pool. `use` comes for every pick, then `admit` for those that were not held."""

    def use(self, key: ExpertKey) -> None:
        """The key is picked now."""

    def admit(self, key: ExpertKey) -> None:
        """The key is held from here on, until it is a victim."""

    def victim(self, wave: set[ExpertKey]) -> ExpertKey:
        """A held key outside the wave, held no longer."""
        ...

    def end_token(self) -> None:
        """All layers of a token are done."""


class Lru:
    """The least recently used leaves."""

    def __init__(self) -> None:
        self._held: OrderedDict[ExpertKey, None] = OrderedDict()

    def use(self, key: ExpertKey) -> None:
        if key in self._held:
            self._held.move_to_end(key)

    def admit(self, key: ExpertKey) -> None:
        self._held[key] = None

    def victim(self, wave: set[ExpertKey]) -> ExpertKey:
        return self._held.popitem(last=False)[0]  # the wave has just been used: it stands last

    def end_token(self) -> None:
        pass


class Lfu:
    """The least used leaves, by the store's counts: halved every `decay_tokens` tokens, ties by recency."""

    def __init__(self, decay_tokens: int) -> None:
        self._counts = UseCounts(decay_tokens)
        self._held = ColdestFirst(self._counts)

    def use(self, key: ExpertKey) -> None:
        self._counts.use(key)

    def admit(self, key: ExpertKey) -> None:
        self._held.add(key)

    def victim(self, wave: set[ExpertKey]) -> ExpertKey:
        spared = []
        while (key := self._held.coldest()) in wave:
            self._held.discard(key)
            spared.append(key)
        for other in spared:
            self._held.add(other)
        assert key is not None, f"{len(wave)=} {len(self._held)=}"
        self._held.discard(key)
        return key

    def end_token(self) -> None:
        if self._counts.end_token():
            self._held.reorder()


class Belady:
    """The one whose next use is furthest leaves: no policy has more hits. Knows the trace that it will be played."""

    def __init__(self, trace: Trace) -> None:
        self._uses: dict[ExpertKey, list[int]] = {}  # of each key, the last first
        for time, keys in reversed(list(enumerate(chain.from_iterable(trace.tokens())))):
            for key in keys:
                self._uses.setdefault(key, []).append(time)
        self._held: set[ExpertKey] = set()
        self._heap: list[tuple[int, ExpertKey]] = []  # (-next use, key); an entry of a past use is dead

    def _next_use(self, key: ExpertKey) -> int:
        return self._uses[key][-1] if self._uses[key] else FURTHEST

    def use(self, key: ExpertKey) -> None:
        self._uses[key].pop()
        if key in self._held:
            heapq.heappush(self._heap, (-self._next_use(key), key))

    def admit(self, key: ExpertKey) -> None:
        self._held.add(key)
        heapq.heappush(self._heap, (-self._next_use(key), key))

    def victim(self, wave: set[ExpertKey]) -> ExpertKey:
        spared = []
        while True:
            entry = heapq.heappop(self._heap)
            time, key = -entry[0], entry[1]
            if key in wave:
                spared.append(entry)
            elif key in self._held and time == self._next_use(key):
                break
        for other in spared:
            heapq.heappush(self._heap, other)
        self._held.remove(key)
        return key

    def end_token(self) -> None:
        pass


def replay(trace: Trace, policy: Policy, num_slots: int) -> list[tuple[int, int]]:
    """(hits, uses) of each token.

    Raises:
        StrawError: Fewer slots than one layer's picks.
    """
    widest = max(len(keys) for waves in trace.tokens() for keys in waves)
    if num_slots < widest:
        raise StrawError(f"--slots {num_slots}: {trace.name} needs {widest} for the picks of one layer")
    held: set[ExpertKey] = set()
    tokens = []
    for waves in trace.tokens():
        hits = 0
        for keys in waves:
            missing = [key for key in keys if key not in held]
            hits += len(keys) - len(missing)
            for key in keys:
                policy.use(key)
            for key in missing:
                if len(held) == num_slots:
                    held.remove(policy.victim(set(keys)))
                held.add(key)
                policy.admit(key)
        policy.end_token()
        tokens.append((hits, sum(map(len, waves))))
    return tokens


def hit_rate(tokens: Sequence[tuple[int, int]]) -> float:
    """Hits per use over these tokens."""
    return sum(hits for hits, _ in tokens) / sum(uses for _, uses in tokens)


def hit_rates(trace: Trace, num_slots: int, decays: Sequence[int]) -> dict[str, dict[str, float]]:
    """{"cold": {policy: hit rate of the whole trace}, "warm": {policy: that after the first WARM_UP of the tokens}}."""
    policies: dict[str, Policy] = {"lru": Lru()}
    policies |= {f"lfu_{decay}": Lfu(decay) for decay in decays}
    policies |= {"lfu_never": Lfu(NO_DECAY), "belady": Belady(trace)}
    rates: dict[str, dict[str, float]] = {"cold": {}, "warm": {}}
    for name, policy in policies.items():
        tokens = replay(trace, policy, num_slots)
        rates["cold"][name] = round(hit_rate(tokens), 4)
        rates["warm"][name] = round(hit_rate(tokens[int(WARM_UP * len(tokens)) :]), 4)
    return rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code; a table per trace on stderr, one JSON document with the same figures on stdout."""
    parser = argparse.ArgumentParser(prog="python -m runtime.store.replay", description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    parser.add_argument("--slots", type=_numbers, help="e.g. 500,1000; default: shares of all experts")
    parser.add_argument("--decay", type=_numbers, default=DECAYS, help="tokens per halving of the LFU's counts")
    options = parser.parse_args(arguments)
    try:
        results = {path.name: _tabulate(load_trace(path), options.slots, options.decay) for path in options.traces}
    except (StrawError, PredictorError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(results) + "\n")
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _tabulate(trace: Trace, slots: Sequence[int] | None, decays: Sequence[int]) -> list[dict[str, object]]:
    total = trace.num_layers * trace.num_experts
    rows: list[dict[str, object]] = []
    sys.stderr.write(
        f"{trace.name}: {len(trace.picks)} tokens, {trace.num_layers} layers x {trace.num_experts} experts\n"
    )
    for num_slots in slots or [round(share * total) for share in SHARES]:
        rates = hit_rates(trace, num_slots, decays)
        if not rows:
            sys.stderr.write(
                f"{'slots':>6} {'share':>6}      " + "".join(f"{name:>10}" for name in rates["cold"]) + "\n"
            )
        rows.append({"slots": num_slots, "share": round(num_slots / total, 4), **rates})
        for start, by_policy in rates.items():
            figures = "".join(f"{rate:10.1%}" for rate in by_policy.values())
            sys.stderr.write(f"{num_slots:6} {num_slots / total:6.1%} {start} {figures}\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
