"""Slabs beyond 4 GiB of a file arrive from their own offsets, through the store's own way of reading; the file is sparse."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from random_checkpoint import TINY
from torch import Tensor

from prep import synth as synth_module
from prep.released_config import RELEASED_CONFIGS
from prep.synth import synth
from prep.synth_plan import SynthSettings
from runtime.artifact import ModelDirectory
from runtime.config import ModelConfig
from runtime.manifest import PlaneRecord, expert_file
from runtime.store.arena import HostArena
from runtime.store.policies import ExpertKey
from runtime.store.reader import SlabReader
from runtime.store.residency import Read
from runtime.store.slab_files import SlabFiles

GIB_4 = 1 << 32
NUM_EXPERTS = 330
SLAB_BYTES = 13_369_344
ACROSS = GIB_4 // SLAB_BYTES  # the slab in which byte 2^32 lies
KNOWN = (0, ACROSS - 1, ACROSS, ACROSS + 1, NUM_EXPERTS - 1)


def known_slab(expert_id: int) -> Tensor:
    return torch.randint(256, (SLAB_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(expert_id))


def write_sparse(path: Path, config: ModelConfig, record: PlaneRecord, key: tuple[int, int]) -> list[int]:
    """Stands in for `write_fp4`: only the slabs in KNOWN take space."""
    checksums = [0] * config.n_routed_experts
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(config.n_routed_experts * record.slab_stride_bytes)
        for expert_id in KNOWN:
            slab = known_slab(expert_id).numpy().data
            file.seek(expert_id * record.slab_stride_bytes)
            file.write(slab)
            checksums[expert_id] = zlib.crc32(slab)
    return checksums


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelDirectory]:
    released = RELEASED_CONFIGS["v4-flash"]
    dense = {name: TINY[name] for name in ("num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")}
    monkeypatch.setitem(RELEASED_CONFIGS, "v4-flash", released | dense)
    monkeypatch.setattr(synth_module, "write_fp4", write_sparse)
    monkeypatch.setattr(synth_module, "require_free_disk", lambda *unused: None)
    synth(tmp_path / "model", SynthSettings(layers=1, experts=NUM_EXPERTS, vocab=64, codec=None))
    with ModelDirectory(tmp_path / "model") as opened:
        yield opened


class Targets:
    """Stands in for the slots: one block a read."""

    def __init__(self, stride_bytes: int) -> None:
        arena = HostArena(len(KNOWN) * stride_bytes)
        self.blocks = [arena.take(stride_bytes) for _ in KNOWN]

    def read_target(self, move: Read) -> Tensor:
        return self.blocks[move.vram_slot]


def test_slabs_beyond_4_gib_arrive_from_their_own_offsets(model: ModelDirectory) -> None:
    path = model.expert_path("fp4", 0)
    assert path.stat().st_size > GIB_4 > ACROSS * SLAB_BYTES
    assert path.stat().st_blocks * 512 < 2 * len(KNOWN) * SLAB_BYTES, f"{expert_file('fp4', 0)} is not sparse"
    files = SlabFiles(model, SlabReader([model.directory], warn=lambda line: None), model.read_checksums())
    targets = Targets(files.stride_bytes("fp4"))
    reads = [Read("fp4", ExpertKey(0, expert_id), slot) for slot, expert_id in enumerate(KNOWN)]
    ended = dict(files.completed(files.submit(reads, targets)))  # type: ignore[arg-type]
    assert ended == dict.fromkeys(reads)
    for expert_id, block in zip(KNOWN, targets.blocks, strict=True):
        assert torch.equal(block[:SLAB_BYTES], known_slab(expert_id))
        assert torch.equal(model.read_slab(0, expert_id), block[:SLAB_BYTES])
    files.close()
