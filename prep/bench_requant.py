"""How fast `prep requant` is on experts of V4-Flash's size, beside the drive's own speed in the same run.

`python -m prep.bench_requant DIR` makes a model directory of random FP4 experts in DIR (untimed), then for each codec measures
first the yardstick, reading all FP4 slabs and writing as many bytes as the code has, both at once and with O_DIRECT, and then one
call of `requant`. Inside its window is all of it: tables' training, pinning, locks, syncs and the manifest; outside are only the
imports and one batch that loads the device's kernels. The table goes to stderr, the last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.formats import CODES, PLANES, split_slab
from kernels.measurement import document
from prep.jobs import say
from prep.requant import WRITERS, describe_requant, requant
from prep.slab_io import BlockRing, SlabFile, batches, read_ahead
from runtime.artifact import DENSE_CHECKSUMS, dense_file_specs, safetensors_header, write_checksums
from runtime.checkpoint import dense_tensors
from runtime.config import ModelConfig
from runtime.devices import compute_device
from runtime.errors import StrawError
from runtime.files import make_directory, remove_file, replacing
from runtime.manifest import (
    CODECS,
    CONFIG,
    DENSE,
    MANIFEST,
    TABLES,
    Manifest,
    PlaneRecord,
    Stage,
    config_record,
    expert_file,
    read_manifest,
    write_manifest,
)
from runtime.store.arena import HostArena, view_bytes
from runtime.store.reader import SlabReader

V4_FLASH_LAYERS, V4_FLASH_EXPERTS = 43, 11_008
HIDDEN, WIDTH = 4096, 2048
EXPONENTS = (118, 124)  # what real MXFP4 experts of this size have
RAW_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 128,
    "num_attention_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 1,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 1,
    "index_head_dim": 128,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "num_hash_layers": 0,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 1,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def build(directory: Path, layers: int, experts: int, device: torch.device, shape: tuple[int, int]) -> None:
    """Makes `directory` a model directory of random experts of `shape` (D, F), its dense part zeros; keeps one that is there."""
    hidden, width = shape
    raw = RAW_CONFIG | {"hidden_size": hidden, "moe_intermediate_size": width, "num_hidden_layers": layers}
    raw |= {"n_routed_experts": experts, "compress_ratios": [0] * layers}
    config = ModelConfig.from_json(raw, directory / CONFIG)
    if (directory / MANIFEST).exists():
        if read_manifest(directory).config != config_record(config):
            raise StrawError(f"{directory}: holds another model, expected none or that of an earlier run; remove it")
        return
    make_directory(directory)
    (directory / CONFIG).write_text(json.dumps(raw))
    checksums = {DENSE_CHECKSUMS: _write_zeros(directory, config)}
    record = PlaneRecord.of("fp4", config)
    checksums["fp4"] = torch.tensor([_write_layer(directory, config, idx, device) for idx in range(layers)])
    write_checksums(directory, checksums)
    names = (CONFIG, DENSE, *(expert_file("fp4", idx) for idx in range(layers)))
    files = {name: (directory / name).stat().st_size for name in names}
    stages = {"layout": Stage({}, done=True)}
    write_manifest(directory, Manifest(config_record(config), "bench", {}, {"fp4": record}, None, files, stages))


def _write_zeros(directory: Path, config: ModelConfig) -> Tensor:
    """The dense file; its tensors' checksums in the order of sorted names."""
    specs, header = dense_file_specs(config), safetensors_header(dense_file_specs(config))
    with (directory / DENSE).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(spec.size_bytes for spec in specs.values()))
    return torch.tensor([zlib.crc32(bytes(specs[name].size_bytes)) for name in sorted(dense_tensors(config))])


def _write_layer(directory: Path, config: ModelConfig, layer_idx: int, device: torch.device) -> list[int]:
    """Random nibbles, exponents in EXPONENTS; the slabs' checksums."""
    record, random = PlaneRecord.of("fp4", config), torch.Generator(device).manual_seed(layer_idx)
    path, checksums = directory / expert_file("fp4", layer_idx), []
    with replacing(path) as temporary, ThreadPoolExecutor(1) as pool:
        file = SlabFile(path, temporary, record.slab_stride_bytes * config.n_routed_experts, say)
        blocks = HostArena(2 * record.slab_stride_bytes).take(2, record.slab_stride_bytes)
        job = None
        for expert_id in range(config.n_routed_experts):
            block = blocks[expert_id % 2]  # the other one is being written
            slab = torch.randint(256, (record.slab_bytes,), dtype=torch.uint8, device=device, generator=random)
            for matrix in split_slab(slab, PLANES["fp4"], config.hidden_size, config.moe_intermediate_size):
                assert matrix.scales is not None
                matrix.scales.remainder_(EXPONENTS[1] - EXPONENTS[0] + 1).add_(EXPONENTS[0])
            block[: record.slab_bytes].copy_(slab)
            checksums.append(zlib.crc32(view_bytes(block)[: record.slab_bytes]))
            if job is not None:
                job.result()
            job = pool.submit(file.write, block, expert_id * record.slab_stride_bytes)
        if job is not None:
            job.result()
        file.finish()
    return checksums


def yardstick_seconds(directory: Path, manifest: Manifest, config: ModelConfig, code: str) -> float:
    """Time to read every fp4 slab and to write as many bytes as `code` has, at once, synced."""
    layers, experts = range(config.num_hidden_layers), config.n_routed_experts
    records = {f"yardstick-{plane}": PlaneRecord.of(plane, config) for plane in CODES[code].planes}
    blocks = BlockRing(records, 1, WRITERS).sets
    for block in blocks:
        for slab in block.values():
            slab.random_()  # a drive or file system may treat zeros otherwise
    source = BlockRing({"fp4": manifest.planes["fp4"]}, WRITERS, 3)
    start = time.perf_counter()
    with SlabReader([directory], warn=say) as reader, ThreadPoolExecutor(WRITERS + 1) as pool:
        reading = pool.submit(_read_all, reader, list(layers), experts, source)
        for layer_idx in layers:
            for plane, record in records.items():
                path = directory / expert_file(plane, layer_idx)
                make_directory(path.parent)
                file = SlabFile(path, path, record.slab_stride_bytes * experts, say)
                jobs = [
                    pool.submit(file.write, blocks[e % WRITERS][plane][0], e * record.slab_stride_bytes)
                    for e in range(experts)
                ]
                wait(jobs)
                file.finish()
                for job in jobs:
                    job.result()
        reading.result()
    seconds = time.perf_counter() - start
    _remove_planes(directory, list(records))
    return seconds


def _read_all(reader: SlabReader, layers: list[int], experts: int, ring: BlockRing) -> None:
    for _ in read_ahead(reader, batches(layers, experts, WRITERS), ring, lambda *key: lambda slab: None):
        pass


def measure(directory: Path, codec: str, config: ModelConfig, device: str) -> dict[str, Any]:
    """One codec beside the yardstick of the same bytes; leaves the directory as it was."""
    manifest, code = read_manifest(directory), CODECS[codec]
    experts, layers = config.num_hidden_layers * config.n_routed_experts, config.num_hidden_layers
    describe_requant(directory, codec, device=device)  # one batch: loads the kernels
    yardstick = yardstick_seconds(directory, manifest, config, code)
    begun, start = time.time(), time.perf_counter()
    plan = requant(directory, codec, device=device)
    seconds = time.perf_counter() - start
    ends = [(directory / expert_file(CODES[code].planes[-1], idx)).stat().st_mtime for idx in range(layers)]
    per_layer = (ends[-1] - ends[0]) / (layers - 1) if layers > 1 else ends[0] - begun
    moved_bytes = plan.read_bytes + plan.write_bytes
    _remove_planes(directory, list(CODES[code].planes))
    remove_file(directory / TABLES)
    write_manifest(directory, manifest)
    all_experts = seconds * V4_FLASH_EXPERTS / experts
    if layers > 1 and config.n_routed_experts == V4_FLASH_EXPERTS // V4_FLASH_LAYERS:
        all_experts = seconds + per_layer * (V4_FLASH_LAYERS - layers)
    return {
        "experts": experts,
        "seconds": seconds,
        "experts_per_second": experts / seconds,
        "experts_per_minute": 60 * experts / seconds,
        "gb_per_second": moved_bytes / seconds / 1e9,
        "yardstick_seconds": yardstick,
        "yardstick_gb_per_second": moved_bytes / yardstick / 1e9,
        "ratio": seconds / yardstick,
        "later_layers_seconds": per_layer,
        "later_layers_ratio": per_layer * layers / yardstick,
        "all_experts_seconds": all_experts,
    }


def _remove_planes(directory: Path, planes: list[str]) -> None:
    for plane in planes:
        for path in sorted((directory / "experts" / plane).glob("*")):
            remove_file(path)
        with suppress(FileNotFoundError):
            (directory / "experts" / plane).rmdir()


def table(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The results for people, one line a codec."""
    yield f"{'codec':8}{'experts/s':>11}{'GB/s':>8}{'drive GB/s':>12}{'ratio':>8}{'later':>8}{'11,008 experts':>17}"
    for codec, row in results.items():
        speeds = f"{row['experts_per_second']:11.2f}{row['gb_per_second']:8.2f}{row['yardstick_gb_per_second']:12.2f}"
        yield f"{codec:8}{speeds}{row['ratio']:8.2f}{row['later_layers_ratio']:8.2f}{row['all_experts_seconds']:15,.0f} s"


def main() -> None:
    """Measures, prints the table on stderr and the JSON as the last line of stdout."""
    parser = argparse.ArgumentParser(prog="python -m prep.bench_requant", description=__doc__)
    parser.add_argument("directory", type=Path, help="made if missing; needs 13.4 MB an expert three times over")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=256, help="of a layer")
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=["clip", "split", "quad"])
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:i; default: cuda if any")
    parser.add_argument("--drive", default=None, help="what DIR lies on, for the record")
    parser.add_argument("--shape", type=int, nargs=2, default=(HIDDEN, WIDTH), help="D and F of an expert")
    options = parser.parse_args()
    device = compute_device(options.device)
    build(options.directory, options.layers, options.experts, torch.device(device), tuple(options.shape))
    config = ModelConfig.from_json(json.loads((options.directory / CONFIG).read_text()), options.directory)
    results = {codec: measure(options.directory, codec, config, device) for codec in options.codecs}
    print("\n".join(table(results)), file=sys.stderr)  # noqa: T201 - this command's output for people
    what = "prep requant beside concurrent O_DIRECT reading and writing of the same bytes"
    measured = {"layers": options.layers, "experts": options.experts, "shape": options.shape, **results}
    print(json.dumps(document(what, "prep.bench_requant", measured, options.drive)))  # noqa: T201 - the last line is the measurement


if __name__ == "__main__":
    main()
