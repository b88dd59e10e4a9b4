"""The tiered store: streaming changes nothing, faults surface where the data was needed, decisions do not hang on time."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from random_checkpoint import write_random_checkpoint
from safetensors.torch import save_file
from torch import Tensor

from prep.layout import layout
from prep.requant import requant
from runtime import open_model
from runtime.artifact import ModelDirectory, expert_file
from runtime.engine import Session
from runtime.errors import StoreError, StrawError
from runtime.store import assemble, slots
from runtime.store.arena import HostArena
from runtime.store.reader import SlabReader
from runtime.store.residency import Residency

NUM_PICKS = 3
NUM_EXPERTS = 12
TOKENS = torch.randint(2, 512, (220,), generator=torch.Generator().manual_seed(5)).tolist()
PREFIX = 20  # prefilled, so that calls need more experts than there are slots
CODES = ("int2", "quad2", "split")
# (FP4 in VRAM, in RAM, 2-bit only in VRAM, in RAM)
POOLS = {"all": (60, 0, 0, 0), "smallest": (NUM_PICKS, 0, 0, 0), "evicting": (7, 9, 0, 0), "ram": (NUM_PICKS, 40, 0, 0)}
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    experts = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_PICKS}
    write_random_checkpoint(directory, max_position_embeddings=400, **experts)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store") / "model"
    layout(checkpoint, directory)
    for codec in ("clip", "quad", "split"):
        requant(directory, codec)
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tensor:
    return run(open_model(checkpoint))


@pytest.fixture(autouse=True)
def _poisoned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no read has filled holds E8M0 bytes of NaN: whoever computes with it is found out."""

    class PoisonedArena(HostArena):
        def take(self, *shape: int) -> Tensor:
            return super().take(*shape).fill_(255)

    monkeypatch.setattr(slots, "HostArena", PoisonedArena)


@pytest.fixture
def reads_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes stores opened from here on read through another `preadv`."""
    return lambda preadv: monkeypatch.setattr(assemble, "SlabReader", partial(SlabReader, preadv=preadv))


def run(session: Session, tokens: list[int] = TOKENS) -> Tensor:
    """Logits [T, V] of a prefill and then step by step, the accounts checked after each."""
    logits = [session.prefill(tokens[:PREFIX])]
    for token_id in tokens[PREFIX:]:
        logits.append(session.step(token_id))
        if session.experts_line.startswith("ladder"):
            session._experts.check_balance()  # type: ignore[attr-defined]
    return torch.stack(logits)


def delayed(seed: int) -> Callable[[int, list[memoryview], int], int]:
    """A drive whose reads take a random while, so that slabs arrive in random order."""
    draw = random.Random(seed)

    def preadv(descriptor: int, targets: list[memoryview], offset: int) -> int:
        time.sleep(draw.random() * 2e-3)
        return os.preadv(descriptor, targets, offset)

    return preadv


def cases(first: list[str], second: list[str], fast: set[tuple[str, str]]) -> list[Any]:
    """All pairs; those not in `fast` are marked slow."""
    pairs = itertools.product(first, second)
    return [pytest.param(*pair, marks=[] if pair in fast else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(
    ("code", "pools"),
    cases(list(CODES), list(POOLS), {("int2", "ram"), ("quad2", "smallest"), ("split", "evicting")}),
)
def test_streaming_changes_nothing(model: Path, expected: Tensor, code: str, pools: str) -> None:
    """Bit-equal logits over 200 tokens, in both layouts, with every pool, against all experts of the released checkpoint."""
    session = open_model(model, code=code, slots=POOLS[pools])
    assert torch.equal(run(session), expected)


@pytest.mark.parametrize("code", ["quad2", "split"])
def test_the_order_of_arrival_changes_nothing(
    model: Path, expected: Tensor, code: str, reads_by: Callable[..., None]
) -> None:
    reads_by(delayed(seed=2))
    session = open_model(model, code=code, slots=POOLS["evicting"])
    assert torch.equal(run(session, TOKENS[:70]), expected[:51])


@pytest.mark.slow
@pytest.mark.parametrize("code", ["quad2", "split"])
def test_random_eviction_changes_nothing(
    model: Path, expected: Tensor, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(9)

    def any_victim(self: Residency, pools: Any, plane: str) -> Any:
        victims = sorted(key for key in pools[plane].slot_of if self._may_go(pools, plane, key))
        return draw.choice(victims) if victims else None

    monkeypatch.setattr(Residency, "_coldest", any_victim)
    session = open_model(model, code=code, slots=POOLS["evicting"])
    assert torch.equal(run(session), expected)


@pytest.fixture(scope="module")
def expected_on_cuda(checkpoint: Path) -> dict[str, Tensor]:
    return {dtype: run(open_model(checkpoint, device="cuda", dtype=dtype)) for dtype in ("float32", "bfloat16")}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("code", "pools", "dtype"),
    [
        *itertools.product(CODES, POOLS, ["float32"]),
        ("quad2", "evicting", "bfloat16"),
        ("split", "ram", "bfloat16"),
    ],
)
def test_streaming_changes_nothing_on_cuda(
    model: Path,
    expected_on_cuda: dict[str, Tensor],
    code: str,
    pools: str,
    dtype: str,
    reads_by: Callable[..., None],
) -> None:
    """As above with real copies and events, reads at random times, and slots of NaN until a copy fills them."""
    reads_by(delayed(seed=3))
    session = open_model(model, device="cuda", dtype=dtype, code=code, slots=POOLS[pools])
    for buffer in session._experts._memory._vram.values():  # type: ignore[attr-defined]
        buffer.fill_(255)
    assert torch.equal(run(session), expected_on_cuda[dtype])


def test_a_mirror_is_read_too(model: Path, expected: Tensor, tmp_path: Path) -> None:
    shutil.copytree(model / "experts", tmp_path / "experts")
    session = open_model(model, code="quad2", slots=POOLS["evicting"], mirrors=[tmp_path])
    assert torch.equal(run(session, TOKENS[:40]), expected[:21])
    with pytest.raises(StrawError, match="no experts/ in it"):
        open_model(model, mirrors=[tmp_path / "experts"])


def test_without_settings_everything_is_held(model: Path, expected: Tensor) -> None:
    session = open_model(model)
    assert torch.equal(run(session, TOKENS[:60]), expected[:41])
    assert f"fp4 {5 * NUM_EXPERTS} VRAM" in session.experts_line or "base 60 VRAM" in session.experts_line


@pytest.mark.parametrize(
    ("code", "ladder"),
    cases(list(CODES), ["1,2", "0,3", "0,0", "mass:0.4,0.8"], {("quad2", "1,2"), ("split", "mass:0.4,0.8")}),
)
def test_decisions_follow_from_the_tokens_alone(
    model: Path, code: str, ladder: str, reads_by: Callable[..., None]
) -> None:
    """Two runs whose reads take different times serve every use alike."""
    seen = []
    for seed in (1, 2):
        reads_by(delayed(seed))
        session = open_model(model, code=code, ladder=ladder, slots=(4, 5, 4, 5))
        logits = run(session, TOKENS[:50])
        stats = session.stats()["store"]
        seen.append((logits, stats["by_layer"], stats["by_rank"], stats["by_plane"]))
    assert torch.equal(seen[0][0], seen[1][0])
    assert seen[0][1:] == seen[1][1:]


def test_the_ladder_spends_by_rank(model: Path, expected: Tensor) -> None:
    session = open_model(model, code="int2", ladder="1,2", slots=(3, 0, 3, 0))
    logits = run(session, TOKENS[:60])
    by_rank = session.stats()["store"]["by_rank"]
    assert set(by_rank["1"]) <= {"FP4 NVMe", "FP4 VRAM"}
    assert any(name.startswith("2-bit") for name in by_rank["2"])
    assert "dropped" not in by_rank["2"]
    assert by_rank["3"]["dropped"] > 0
    assert not torch.equal(logits, expected[:41])


def test_dropping_everything_absent_still_fetches_the_best(model: Path) -> None:
    session = open_model(model, code="quad2", ladder="0,0", slots=(3, 0, 3, 0))
    logits = run(session, TOKENS[:40])
    uses = session.stats()["store"]["per_token"]["uses"]
    assert uses["dropped"] > 0
    assert uses.get("2-bit NVMe", 0) > 0
    assert torch.isfinite(logits).all()


def failing_at(path: Path, offset: int, action: Callable[[], int]) -> Callable[[int, list[memoryview], int], int]:
    """A drive that does `action` when `offset` of `path` is read."""

    def preadv(descriptor: int, targets: list[memoryview], at: int) -> int:
        if at == offset and Path(f"/proc/self/fd/{descriptor}").resolve() == path.resolve():
            return action()
        return os.preadv(descriptor, targets, at)

    return preadv


def eio() -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def victim(model: Path, checkpoint: Path) -> tuple[int, int]:
    """A layer with a learned router and an expert that TOKENS use there, but not at once."""
    seen: list[list[int]] = []
    session = open_model(checkpoint)
    session.observer = lambda layer_idx, x, ids, weights: (
        seen.append(ids.flatten().tolist()) if layer_idx == 3 else None
    )
    session.prefill(TOKENS[:60])
    late = [expert_id for expert_id in range(NUM_EXPERTS) if expert_id in seen[0]]
    return 3, late[0]


@pytest.mark.parametrize(
    ("action", "found"), [(eio, "Input/output error"), (lambda: 0, "")], ids=["EIO", "end of file"]
)
def test_a_failed_read_raises_and_names_the_expert(
    model: Path, victim: tuple[int, int], reads_by: Callable[..., None], action: Callable[[], int], found: str
) -> None:
    layer_idx, expert_id = victim
    with ModelDirectory(model) as opened:
        path, stride = opened.expert_path("fp4", layer_idx), opened.planes["fp4"].slab_stride_bytes
    reads_by(failing_at(path, expert_id * stride, action))
    session = open_model(model, code="quad2", slots=POOLS["evicting"])
    with pytest.raises(StoreError, match=f"layer {layer_idx} expert {expert_id} fp4") as caught:
        session.prefill(TOKENS[:60])
    assert path.name in str(caught.value)
    assert found in str(caught.value)
    session._experts.check_balance()  # type: ignore[attr-defined]
    assert session.token_ids == []


def test_after_a_failed_read_the_others_go_on(
    model: Path, expected: Tensor, victim: tuple[int, int], reads_by: Callable[..., None]
) -> None:
    """A drive that fails once: the call raises, and the next attempt gives the very bits of a run without a fault."""
    layer_idx, expert_id = victim
    with ModelDirectory(model) as opened:
        path, stride = opened.expert_path("fp4", layer_idx), opened.planes["fp4"].slab_stride_bytes
    failing = failing_at(path, expert_id * stride, eio)
    has_failed: list[bool] = []

    def preadv(descriptor: int, targets: list[memoryview], at: int) -> int:
        try:
            return (os.preadv if has_failed else failing)(descriptor, targets, at)
        except OSError:
            has_failed.append(True)
            raise

    reads_by(preadv)
    session = open_model(model, code="quad2", slots=POOLS["evicting"])
    with pytest.raises(StoreError, match=f"expert {expert_id} "):
        session.prefill(TOKENS[:60])
    assert torch.equal(run(session, TOKENS[:60]), expected[:41])


def test_a_killed_worker_is_an_error_and_no_hang(model: Path, reads_by: Callable[..., None]) -> None:
    def preadv(descriptor: int, targets: list[memoryview], at: int) -> int:
        raise RuntimeError("a fault of the program")

    reads_by(preadv)
    session = open_model(model, slots=POOLS["smallest"])
    with pytest.raises(StoreError, match="a reading thread ended"):
        session.prefill(TOKENS[:4])


@pytest.fixture
def damaged(model: Path, victim: tuple[int, int]) -> Iterator[Path]:
    """The model with one bit of one slab flipped."""
    layer_idx, expert_id = victim
    with ModelDirectory(model) as opened:
        offset = expert_id * opened.planes["fp4"].slab_stride_bytes + 77
    path = model / expert_file("fp4", layer_idx)
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        yield model
        file.seek(offset)
        file.write(bytes([byte]))


def test_a_flipped_bit_is_found_by_verify_reads(damaged: Path, victim: tuple[int, int]) -> None:
    session = open_model(damaged, code="quad2", slots=POOLS["smallest"], verify_reads=True)
    with pytest.raises(StoreError, match=rf"expert {victim[1]} has CRC-32 .* run: prep verify"):
        session.prefill(TOKENS[:60])


def test_an_interrupt_inside_a_layer_ends_the_store(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may still be under way to a slot that nobody knows of: no later call may use the store."""
    session = open_model(model, slots=POOLS["smallest"])

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session._experts, "_compute", interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        session.prefill(TOKENS[:4])
    monkeypatch.undo()
    with pytest.raises(StoreError, match="open the model again"):
        session.prefill(TOKENS[:4])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": (2, 0, 0, 0)}, "slots: 2 for fp4 in VRAM, the ladder needs at least 3"),
        ({"slots": (3, 0, 0, 0), "ladder": "1,2"}, "slots: 0 for quad2 in VRAM"),
        ({"slots": "3,0,0"}, "expected four counts"),
        ({"slots": "²,0,0,0"}, "expected four counts"),
        ({"slots": "9" * 5000 + ",0,0,0"}, "expected four counts"),
        ({"vram": "²GB"}, "expected a number with its unit"),
        ({"vram": "9" * 400 + "GB"}, "expected a number with its unit"),
        ({"slots": (3, 0, 0, 0), "ram": "1GB"}, "not both"),
        ({"vram": "3"}, "expected a number with its unit"),
        ({"vram": "1MB"}, "the ladder needs at least 3"),
        ({"ram": "900000GB"}, "are available"),
        ({"code": "int3"}, "--code int3"),
        ({"ladder": "2,9"}, "expected a,b with 0 <= a <= b <= 3"),
    ],
)
def test_settings_that_cannot_be_met(model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(StrawError, match=message):
        open_model(model, **{"code": "quad2", **options})  # type: ignore[arg-type]


def test_auto_spends_precision_only_where_memory_is_short(model: Path) -> None:
    assert "ladder exact" in open_model(model, ladder="auto").experts_line
    assert "ladder 2,3" in open_model(model, ladder="auto", code="quad2", slots=(4, 0, 4, 0)).experts_line


def test_heat_seeds_the_use_counts(model: Path) -> None:
    """With heat the slabs that a trace used most survive the first evictions."""
    uses = torch.zeros(5, NUM_EXPERTS, dtype=torch.int64)
    uses[3] = 1000
    save_file({"uses": uses, "tokens": torch.tensor([8])}, model / "heat.safetensors")
    try:
        session = open_model(model, code="int2", slots=(20, 0, 0, 0))
        session.prefill(TOKENS[:40])
        held = session._experts._residency._vram["fp4"].slot_of  # type: ignore[attr-defined]
        assert sum(key.layer_idx == 3 for key in held) >= NUM_EXPERTS - 2
        save_file({"uses": uses[:2].contiguous(), "tokens": torch.tensor([8])}, model / "heat.safetensors")
        with pytest.raises(StrawError, match=r"heat\.safetensors: tensor uses"):
            open_model(model)
    finally:
        (model / "heat.safetensors").unlink()


def test_closing_ends_the_threads(model: Path) -> None:
    before = threading.active_count()
    session = open_model(model, slots=POOLS["smallest"])
    assert threading.active_count() > before
    session.close()
    assert threading.active_count() == before


def test_a_session_that_is_let_go_ends_its_threads(model: Path) -> None:
    before = threading.active_count()
    session = open_model(model, slots=POOLS["smallest"])
    assert threading.active_count() > before
    del session
    assert threading.active_count() == before
