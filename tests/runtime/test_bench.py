"""`runtime bench --force-tokens`: variants do the same work and give the same bits, the arithmetic of its report, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from tiny_tokenizer import build_tokenizer
from torch import Tensor
from virtual_drive import VirtualClock, VirtualFiles

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.artifact import ModelDirectory
from runtime.bench import COUNTERS, BenchSettings, Run, check_same_demand, forced_ids, run_bench, schedule
from runtime.bench_record import LayerCost, Note, TokenCost, perfect_schedule, token_costs
from runtime.bench_report import ratio_interval, results, table
from runtime.bench_variants import PollingFiles, Variants, parse_variants, prefetch_for
from runtime.cli import main
from runtime.engine import Session
from runtime.errors import StoreError, StrawError
from runtime.store import assemble
from runtime.store.policies import ExpertKey
from runtime.store.residency import Read
from runtime.store.slab_files import SlabFiles
from runtime.store.store import TieredStore

NUM_EXPERTS, NUM_PICKS, NUM_LAYERS, NUM_HASH = 8, 2, 5, 1
COMPUTE_US = 1000  # of a layer, on the virtual clock
SLOTS = (4 * NUM_PICKS + 1, 4, 0, 0)  # as few in VRAM as the evicting variant can do with
TOKENS = torch.randint(2, 512, (24,), generator=torch.Generator().manual_seed(5)).tolist()
SETTINGS = BenchSettings(("off", "hash"), repeat=1, tokens=8, prompt_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(
        directory,
        compress_ratios=[0] * (NUM_LAYERS + 1),
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_PICKS,
        num_hash_layers=NUM_HASH,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=128,
    )
    build_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "model"
    layout(checkpoint, directory)
    requant(directory, "clip")
    return directory


class Stubborn:
    """A predictor that always says the same experts, most of them wrong."""

    lookaheads = (2, 3)

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        return torch.arange(float(NUM_EXPERTS)).roll(layer_idx).expand(1, 2, -1)


class Knowing:
    """A predictor that has seen the first variant's runs: the experts of every layer of every step."""

    lookaheads = (2, 3)

    def __init__(self, picks: list[list[int]]) -> None:
        self._picks, self._step = picks, -1

    def scores(self, layer_idx: int, x: Tensor) -> Tensor:
        self._step = (self._step + (layer_idx == 0)) % (len(self._picks) // NUM_LAYERS)
        scores = torch.zeros(1, 2, NUM_EXPERTS)
        for row, target in enumerate((layer_idx + 2, layer_idx + 3)):
            if target < NUM_LAYERS:
                scores[0, row, self._picks[self._step * NUM_LAYERS + target]] = 1.0
        return scores


@pytest.fixture
def virtual(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Opens the model on a virtual drive of so many bytes per µs; each layer computes for COMPUTE_US."""

    def opened(bytes_per_us: int = 60, predictor: Any = None, directory: Path = model, **options: Any) -> Session:
        clock = VirtualClock()

        def timed(weights, new_residency, memory, files, ladder, watch, prefetcher) -> TieredStore:
            files.close()
            drive = VirtualFiles(ModelDirectory(directory), clock, bytes_per_us)
            if prefetcher:
                prefetcher._predictor = predictor
            return TieredStore(weights, new_residency, memory, drive, ladder, watch, prefetcher, clock)  # type: ignore[arg-type]

        def compute(*_: Any) -> None:
            clock.now_us += COMPUTE_US

        monkeypatch.setattr(assemble, "TieredStore", timed)
        session = open_model(directory, **{"slots": SLOTS, "prefetch": "hash"} | options)
        session.observer = compute
        return session

    return opened


def by_hand(session: Session) -> Tensor:
    """Logits after the last token of SETTINGS, without the harness."""
    session.reset()
    session.prefill(TOKENS[: SETTINGS.prompt_tokens])
    return [session.step(token_id) for token_id in TOKENS[SETTINGS.prompt_tokens : SETTINGS.num_tokens]][-1]


def pools(session: Session) -> list[dict[str, set[ExpertKey]]]:
    residency = session._experts._residency  # type: ignore[union-attr]
    residency.check_balance()
    assert not any(pool.transfers for pool in residency._ram.values())  # all copies were reported
    return [{plane: set(pool.slot_of) for plane, pool in tier.items()} for tier in (residency._vram, residency._ram)]


def pools_by_run(session: Session, runs: Iterator[Run]) -> Iterator[tuple[Run, list[Any]]]:
    """Each run, with what the pools held as each layer of it began."""
    compute, contents = session.observer, []
    assert compute is not None

    def see(*arguments: Any) -> None:
        contents.append(pools(session))
        compute(*arguments)

    session.observer = see
    for run in runs:
        layers = NUM_LAYERS * (SETTINGS.tokens + 1)  # the prefill is one call
        yield run, contents[-layers:]
    session.observer = compute


def test_variants_demand_the_same_and_give_the_same_bits(virtual: Callable[..., Session]) -> None:
    session = virtual(predictor=Stubborn())
    expected, opened = by_hand(session), session._experts
    settings = replace(SETTINGS, variants=("off", "hash", "predictor", "evicting", "evicting", "predictor", "off"))
    played = list(pools_by_run(session, run_bench(session, TOKENS, settings)))
    off, hashed, guessing, evicting, *again = (run for run, _ in played)
    assert tuple(run.variant for run, _ in played) == settings.variants
    assert len({run.digest for run, _ in played}) == 1
    assert all(torch.equal(run.logits, expected) for run, _ in played)
    contents = [contents for _, contents in played]
    assert contents[1] == contents[2] == contents[0]  # a guess evicts nothing
    assert contents[3] != contents[0]  # the control's do
    assert off.prefetch["issued"] == 0
    assert hashed.prefetch["wasted"] == 0 < hashed.prefetch["used"]
    assert hashed.wait_ms < off.wait_ms
    assert guessing.prefetch["wasted"] > 0 < evicting.prefetch["wasted"]
    for one, other in zip((evicting, guessing, off), again, strict=True):  # nothing is carried over
        assert (one.ms, one.wait_ms) == pytest.approx((other.ms, other.wait_ms))
        assert one.prefetch == other.prefetch
    assert session._experts is opened
    assert torch.equal(by_hand(session), expected)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(9, 3, 0, 0), (16, 6, 0, 0)])
def test_evicting_in_parts(
    virtual: Callable[..., Session], model: Path, tmp_path: Path, slots: tuple[int, ...]
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "model"))
    requant(directory, "split")
    session = virtual(predictor=Stubborn(), directory=directory, slots=slots, code="split")
    settings = replace(SETTINGS, variants=("off", "evicting"))
    (off, before), (evicting, after) = pools_by_run(session, run_bench(session, TOKENS, settings))
    assert before != after
    assert torch.equal(off.logits, evicting.logits)


def test_times_are_those_of_the_window(virtual: Callable[..., Session]) -> None:
    session = virtual(bytes_per_us=200)
    runs = list(run_bench(session, TOKENS, SETTINGS))
    for run in runs:
        assert run.ms == pytest.approx(NUM_LAYERS * COMPUTE_US / 1e3 + run.wait_ms)
    off = runs[0]
    stride = session._experts._files.stride_bytes("fp4")  # type: ignore[union-attr]
    assert off.nvme_bytes * SETTINGS.tokens % stride == 0
    # Pieces take whole microseconds.
    assert off.read_ms == pytest.approx(off.nvme_bytes / 200 / 1e3, rel=0.01)
    assert off.read_ms == pytest.approx(
        off.wait_ms
    )  # the drive works only while the store waits, and never for nothing


def test_what_perfect_prefetch_would_give_is_near_what_an_oracle_gets(virtual: Callable[..., Session]) -> None:
    off = next(run_bench(virtual(), TOKENS, replace(SETTINGS, variants=("off",))))
    steps = off.picks[-SETTINGS.tokens * NUM_LAYERS :]
    oracle = Knowing([[expert_id for expert_id, _ in tokens[0]] for _, tokens in steps])
    compute_ms = NUM_LAYERS * COMPUTE_US / 1e3
    speed = round(off.nvme_bytes / 1e3 / (0.6 * compute_ms))
    off, knowing = run_bench(virtual(speed, oracle), TOKENS, replace(SETTINGS, variants=("off", "predictor")))
    assert compute_ms < off.perfect_ms < off.ms
    assert off.perfect_ms < knowing.ms  # a bound: the oracle says nothing of the layer behind the hash layer
    assert off.ms - knowing.ms > 0.8 * (off.ms - off.perfect_ms)


def test_other_work_is_not_compared(virtual: Callable[..., Session]) -> None:
    session = virtual(predictor=Stubborn(), slots=(NUM_PICKS, 2, NUM_PICKS, 2), ladder="1,1")
    settings = replace(SETTINGS, variants=("off", "off", "predictor"))
    seen = []
    with pytest.raises(
        StrawError, match=r"variant predictor: layer \d asked for expert .* as in variant off; .*use --ladder exact"
    ):
        for run in run_bench(session, TOKENS, settings):
            seen.append(run.variant)
    assert seen == ["off", "off"]  # what prefetches nothing is reproducible under any ladder


def planted(**changes: Any) -> Run:
    picks = [(0, (((3, "FP4"), (1, "2-bit")),))]
    run = Run("off", 10.0, 2.0, 1e6, dict.fromkeys(COUNTERS, 0), 8.5, 3.0, picks, torch.zeros(2))
    return replace(run, **changes)


@pytest.mark.parametrize("other", [((3, "FP4"), (1, "FP4")), ((3, "FP4"), (2, "2-bit"))])
def test_a_pick_or_a_precision_that_differs_is_seen(other: Any) -> None:
    check_same_demand(planted(), planted(variant="hash"))
    with pytest.raises(
        StrawError,
        match=f"variant hash: layer 0 asked for expert {other[1][0]} {other[1][1]} .*expected expert 1 2-bit",
    ):
        check_same_demand(planted(), planted(variant="hash", picks=[(0, (other,))]))


def test_the_order_is_a_warm_up_then_in_turn(virtual: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedule(["a", "b", "c"], 2) == ["a", "b", "c", "a", "b", "c"]
    begun: list[str] = []
    begin = Variants.begin
    monkeypatch.setattr(Variants, "begin", lambda self, name: begun.append(name) or begin(self, name))
    assert len(list(run_bench(virtual(), TOKENS, replace(SETTINGS, tokens=1, repeat=2)))) == 4
    assert begun == ["off", "off", "hash", "off", "hash"]


NOISE = (1.0, 1.31, 0.94, 1.12, 1.05)  # of the machine, alike for both of a pair


def test_the_interval_is_of_pairs() -> None:
    first = [100 * noise for noise in NOISE]
    slower = [1.1 * time * wobble for time, wobble in zip(first, (1.0, 1.01, 0.98, 1.02, 0.99), strict=True)]
    found = ratio_interval(first, slower)
    assert 1.0 < found["low"] <= found["median"] <= found["high"] < 1.2
    assert found["median"] == pytest.approx(1.1)
    same = ratio_interval(
        first, [time * wobble for time, wobble in zip(first, (0.98, 1.01, 1.02, 0.99, 1.0), strict=True)]
    )
    assert same["low"] < 1.0 < same["high"]
    assert ratio_interval(first, list(reversed(first)))["high"] > 1.1  # what is no pair is wide


def test_the_report() -> None:
    settings = BenchSettings(("off", "hash"), repeat=3, tokens=8)
    runs = [
        planted(variant=name, ms=ms) for name, ms in zip(("off", "hash") * 3, (10, 11, 20, 22, 30, 33), strict=True)
    ]
    found = results(runs, settings)
    off, hashed = found["variants"]
    assert (off["ms_per_token"], off["runs_ms_per_token"], off["ratio_to_first"]) == (20, [10, 20, 30], None)
    assert hashed["ms_per_token"] == 22
    assert [hashed["ratio_to_first"][name] for name in ("low", "median", "high")] == pytest.approx([1.1] * 3)
    assert found["perfect"] == {
        "ms_per_token": 8.5,
        "compute_ms_per_token": 18.0,
        "read_ms_per_token": 3.0,
        "lookahead": 2,
    }
    assert table(json.loads(json.dumps(found)))[-1].startswith("perfect prefetch would give 8.500 ms per token")
    no_line = table(results(runs, replace(settings, variants=("hash", "off"))))[-1]
    assert no_line.startswith("perfect prefetch: not computed")


@pytest.mark.parametrize(
    ("layers", "lookahead", "lead_ms", "expected"),
    [
        ([(10, 0)] * 4, 2, 3, 43),  # no I/O
        ([(10, 5)] * 4, 2, 0, 45),  # half of compute: only the first read is waited for
        ([(10, 5, True), (10, 5), (10, 5)], 2, 5, 35),  # and that one begins with the token
        ([(10, 5, True), (10, 5), (10, 5)], 2, 3, 35),
        ([(1, 100, True)] * 3, 2, 0, 301),  # I/O alone, and the last layer's compute
        ([(10, 5)] * 3, 0, 7, 52),  # nothing known ahead: both add up
        ([(10, 0), (10, 0), (10, 0), (10, 30)], 2, 0, 50),  # known at 10, read at 40
        ([(10, 0), (10, 0), (10, 0), (10, 30)], 1, 0, 60),
        ([(10, 0), (10, 0), (10, 25), (10, 25)], 2, 0, 60),  # the drive does one after the other: 25, then 50
        ([], 2, 4, 4),
    ],
)
def test_a_perfect_schedule(layers: list[tuple[Any, ...]], lookahead: int, lead_ms: float, expected: float) -> None:
    assert perfect_schedule([LayerCost(*layer) for layer in layers], lookahead, lead_ms) == expected


def test_a_steps_time_in_parts() -> None:
    notes = [
        Note(0.5, 0.0, 0, None),
        Note(1.0, 0.0, 0, 0),
        Note(3.0, 1.5, 4000, 1),
        Note(4.0, 1.5, 4000, None),
        Note(4.25, 1.5, 4000, 0),
        Note(5.25, 1.5, 4000, 1),
    ]
    found = token_costs(notes, Note(6.5, 2.0, 5000, None), bytes_per_second=2000, num_hash_layers=1)
    assert found == [
        TokenCost(500, [LayerCost(500, 2000, True), LayerCost(1000, 0, False)]),
        TokenCost(250, [LayerCost(1000, 0, True), LayerCost(750, 500, False)]),
    ]


class SlowTicket:
    """Done after so many looks."""

    def __init__(self, looks: int, error: StoreError | None = None) -> None:
        self.looks, self.error = looks, error

    def is_done(self) -> bool:
        return self.looks <= 0

    def wait(self) -> None:
        if self.error:
            raise self.error


class Watched:
    """A reader whose tickets may only be waited for when they are done."""

    def completed(self, tickets: Any) -> Iterator[SlowTicket]:
        assert all(ticket.is_done() for ticket in tickets)
        yield from tickets


def test_polling_sleeps_until_a_read_is_done() -> None:
    slept = []
    error = StoreError("gone")
    tickets = {
        SlowTicket(looks, error if looks == 2 else None): Read("fp4", ExpertKey(0, looks), 0) for looks in (3, 0, 2)
    }

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        for ticket in tickets:
            ticket.looks -= 1

    files = PollingFiles(SlabFiles(None, Watched(), {}), sleep)  # type: ignore[arg-type]
    found = [(move.key.expert_id, failure) for move, failure in files.completed(tickets)]  # type: ignore[arg-type]
    assert found == [(0, None), (2, error), (3, None)]
    assert slept == [300e-6] * 3


def test_polling_gives_the_same_bits(model: Path) -> None:
    session = open_model(model, slots=SLOTS)
    runs = list(run_bench(session, TOKENS, replace(SETTINGS, variants=("off", "polling"))))
    assert runs[0].prefetch["issued"] == 0
    assert len({run.digest for run in runs}) == len({run.nvme_bytes for run in runs}) == 1
    assert all(torch.equal(run.logits, runs[0].logits) for run in runs)
    session.close()


def test_what_a_session_is_opened_with() -> None:
    assert parse_variants("off, evicting,off") == ("off", "evicting", "off")
    assert [
        prefetch_for(names.split(",")) for names in ("off,polling", "off,hash", "evicting", "off,hash,predictor")
    ] == [
        "off",
        "hash",
        "hash",
        "predictor",
    ]


def test_forced_tokens(model: Path, tmp_path: Path) -> None:
    session = open_model(model, slots=SLOTS)
    text, numbers = tmp_path / "some.txt", tmp_path / "some.json"
    text.write_text("hello world\n")
    numbers.write_text("[3, 511]")
    assert forced_ids(numbers, session) == [3, 511]
    ids = forced_ids(text, session)
    assert ids[0] == session.config.bos_token_id
    assert session.tokenizer is not None
    assert session.tokenizer.decode(ids) == "hello world\n"
    for wrong in ("[3, 512]", "[true]", '{"a": 1}', "[1.5]", "[", '"text"'):
        numbers.write_text(wrong)
        with pytest.raises(StrawError, match=r"some\.json: .*name another --force-tokens"):
            forced_ids(numbers, session)
    text.write_bytes(b"\xff")
    with pytest.raises(StrawError, match=r"some\.txt: cannot be read .*expected a text file or"):
        forced_ids(text, session)
    session.close()


def command(model: Path, *options: str) -> list[str]:
    return ["bench", str(model), "--device", "cpu", "--tokens", "6", "--prompt-tokens", "3", "--repeat", "2", *options]


def test_the_command_ends_with_one_json_document(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    with pytest.raises(SystemExit) as end:
        main([*command(model, "--force-tokens", str(file), "--variants", "off,hash"), "--slots", "9,0,0,0"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert {"what", "command", "machine", "versions", "commit", "results"} == set(document)
    assert [row["variant"] for row in document["results"]["variants"]] == ["off", "hash"]
    assert [line.split()[0] for line in lines[:3]] == ["variant", "off", "hash"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--force-tokens", "MISSING.txt"], "MISSING.txt: cannot be read (No such file or directory), expected a text"),
        (["--variants", "off,oracle"], "variants: 'oracle', expected some of off,hash,predictor,evicting,polling"),
        (["--variants", "off", "--tokens", "60"], "--force-tokens: 24 tokens, expected at least 63"),
        (["--variants", "off", "--context", "8"], "context: 8 tokens, expected at least 9"),
        (["--variants", "off,predictor"], "predictor.safetensors: no such file, expected a trained predictor"),
        (
            ["--variants", "off,evicting", "--slots", "8,0,0,0"],
            "slots: 8 for fp4 in VRAM, the evicting variant needs",
        ),
    ],
)
def test_bad_input_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    check_error(command(model, "--force-tokens", str(file), "--variants", "off", *options), capsys, expected)


@pytest.mark.parametrize(
    ("variants", "expected"), [("off", "all its experts are held"), ("hash", "released checkpoint")]
)
def test_a_checkpoint_has_no_store(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], variants: str, expected: str
) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    check_error(command(checkpoint, "--force-tokens", str(file), "--variants", variants), capsys, expected)


def check_error(arguments: list[str], capsys: pytest.CaptureFixture[str], expected: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    output = capsys.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error:")]
    assert (end.value.code, output.out, len(errors)) == (1, "", 1)
    assert expected in errors[0]
