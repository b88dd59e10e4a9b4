"""The released checkpoint: `config.json`, an index and safetensors shards with raw names; its reader and its writer.

Owns which tensors a DeepSeek-V4 checkpoint has, with dtype and shape. Draft stages (`mtp.*`) are known and left unread.
Opening costs the headers only, whatever the size of the shards.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.config import FP4_GROUP, FP8_BLOCK, ModelConfig, read_json
from runtime.errors import CheckpointError
from runtime.safetensors_file import SafetensorsFile, TensorSpec

INDEX = "model.safetensors.index.json"
DRAFT_PREFIX = "mtp."
REMEDY = "fetch the file again"


def _bf16(*shape: int) -> TensorSpec:
    return TensorSpec("BF16", shape)


def _f32(*shape: int) -> TensorSpec:
    return TensorSpec("F32", shape)


def _fp8(stem: str, rows: int, columns: int) -> dict[str, TensorSpec]:
    scales = TensorSpec("F8_E8M0", (rows // FP8_BLOCK, columns // FP8_BLOCK))
    return {f"{stem}.weight": TensorSpec("F8_E4M3", (rows, columns)), f"{stem}.scale": scales}


def _fp4(stem: str, rows: int, columns: int) -> dict[str, TensorSpec]:
    scales = TensorSpec("F8_E8M0", (rows, columns // FP4_GROUP))
    return {f"{stem}.weight": TensorSpec("I8", (rows, columns // 2)), f"{stem}.scale": scales}


def root_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> spec of the tensors outside the layers (facts 2.2)."""
    hidden, streams = config.hidden_size, config.hc_mult
    return {
        "embed.weight": _bf16(config.vocab_size, hidden),
        "head.weight": _bf16(config.vocab_size, hidden),
        "norm.weight": _bf16(hidden),
        "hc_head_fn": _f32(streams, streams * hidden),
        "hc_head_base": _f32(streams),
        "hc_head_scale": _f32(1),
    }


def dense_layer_tensors(config: ModelConfig, layer_idx: int) -> dict[str, TensorSpec]:
    """Name -> spec of one layer's tensors without its routed experts (facts 2.3)."""
    specs = _hyper_connection_tensors(config) | _attention_tensors(config)
    specs |= _router_tensors(config, layer_idx)
    hidden, width = config.hidden_size, config.moe_intermediate_size
    for name, rows, columns in (("w1", width, hidden), ("w2", hidden, width), ("w3", width, hidden)):
        specs |= _fp8(f"ffn.shared_experts.{name}", rows, columns)
    ratio = config.layer_ratios[layer_idx]
    if ratio:
        specs |= _compressor_tensors(config, "attn.compressor", ratio, config.head_dim)
    if ratio == 4:
        specs |= _fp8("attn.indexer.wq_b", config.index_n_heads * config.index_head_dim, config.q_lora_rank)
        specs["attn.indexer.weights_proj.weight"] = _bf16(config.index_n_heads, hidden)
        specs |= _compressor_tensors(config, "attn.indexer.compressor", ratio, config.index_head_dim)
    return {f"layers.{layer_idx}.{name}": spec for name, spec in specs.items()}


def _hyper_connection_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    mixes = (2 + config.hc_mult) * config.hc_mult
    specs: dict[str, TensorSpec] = {}
    for part in ("attn", "ffn"):
        specs[f"hc_{part}_fn"] = _f32(mixes, config.hc_mult * config.hidden_size)
        specs[f"hc_{part}_base"] = _f32(mixes)
        specs[f"hc_{part}_scale"] = _f32(3)
    return specs


def _attention_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    hidden, heads, group_out = config.hidden_size, config.num_attention_heads, config.o_groups * config.o_lora_rank
    specs = {f"{part}_norm.weight": _bf16(hidden) for part in ("attn", "ffn")}
    specs["attn.attn_sink"] = _f32(heads)
    specs["attn.q_norm.weight"] = _bf16(config.q_lora_rank)
    specs["attn.kv_norm.weight"] = _bf16(config.head_dim)
    specs |= _fp8("attn.wq_a", config.q_lora_rank, hidden)
    specs |= _fp8("attn.wq_b", heads * config.head_dim, config.q_lora_rank)
    specs |= _fp8("attn.wkv", config.head_dim, hidden)
    specs |= _fp8("attn.wo_a", group_out, heads * config.head_dim // config.o_groups)
    specs |= _fp8("attn.wo_b", hidden, group_out)
    return specs


def _compressor_tensors(config: ModelConfig, stem: str, ratio: int, width: int) -> dict[str, TensorSpec]:
    columns = width * (2 if ratio == 4 else 1)  # ratio 4 overlaps: an A half for the next window, a B half for its own
    return {
        f"{stem}.ape": _f32(ratio, columns),
        f"{stem}.wkv.weight": _bf16(columns, config.hidden_size),
        f"{stem}.wgate.weight": _bf16(columns, config.hidden_size),
        f"{stem}.norm.weight": _bf16(width),
    }


def _router_tensors(config: ModelConfig, layer_idx: int) -> dict[str, TensorSpec]:
    specs = {"ffn.gate.weight": _bf16(config.n_routed_experts, config.hidden_size)}
    if layer_idx < config.num_hash_layers:
        specs["ffn.gate.tid2eid"] = TensorSpec("I64", (config.vocab_size, config.num_experts_per_tok))
    else:
        specs["ffn.gate.bias"] = _f32(config.n_routed_experts)
    return specs


def expert_tensors(config: ModelConfig, layer_idx: int, expert_id: int) -> dict[str, TensorSpec]:
    """Name -> spec of one routed expert's six tensors, in slab order: codes and scales of w1, w3, w2."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    stem = f"layers.{layer_idx}.ffn.experts.{expert_id}"
    return _fp4(f"{stem}.w1", width, hidden) | _fp4(f"{stem}.w3", width, hidden) | _fp4(f"{stem}.w2", hidden, width)


def dense_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> spec of every tensor that is not a routed expert's."""
    specs = root_tensors(config)
    for layer_idx in range(config.num_hidden_layers):
        specs |= dense_layer_tensors(config, layer_idx)
    return specs


def model_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Name -> spec of every tensor of the model, the draft stages left out."""
    specs = dense_tensors(config)
    for layer_idx in range(config.num_hidden_layers):
        for expert_id in range(config.n_routed_experts):
            specs |= expert_tensors(config, layer_idx, expert_id)
    return specs


class Checkpoint:
    """An opened released checkpoint. Reads one tensor at a time; holds one file descriptor a shard until `close`."""

    def __init__(self, directory: Path, consumed: Collection[str] = ()) -> None:
        """Opens `directory` and checks config, index, every shard's header and every tensor's dtype and shape.

        Args:
            directory: Of the release.
            consumed: Shards that may be missing, their tensors with them (`prep layout --consume`); those that are stand in
                the attribute of that name afterwards.

        Raises:
            CheckpointError: Something is missing, truncated or not as the config says; one line that names it.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: no such directory, expected a released checkpoint; name another")
        self.directory = directory
        self.raw_config: dict[str, Any] = read_json(directory / "config.json")
        self.config = ModelConfig.from_json(self.raw_config, directory / "config.json")
        self.shard_of = self._read_index()
        shards = sorted(set(self.shard_of.values()))
        self.consumed = frozenset(name for name in shards if name in consumed and not (directory / name).exists())
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            for shard in shards:
                if shard in self.consumed:
                    continue
                self._shards[shard] = SafetensorsFile(directory / shard, CheckpointError, REMEDY)
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self.shard_of

    def read(self, name: str) -> Tensor:
        """The tensor `name` as released, newly allocated on the CPU.

        Raises:
            CheckpointError: Its shard was consumed, ended early or could not be read.
        """
        shard = self.shard_of[name]
        if shard in self.consumed:
            raise CheckpointError(
                f"{self.directory / shard}: consumed by prep layout --consume, expected it for {name}; {REMEDY}"
            )
        return self._shards[shard].read(name)

    def read_slab(self, layer_idx: int, expert_id: int) -> Tensor:
        """One routed expert as an FP4 slab (byte order 1, `kernels.formats.split_slab`): uint8 [slab_bytes], on the CPU."""
        names = expert_tensors(self.config, layer_idx, expert_id)
        return torch.cat([self.read(name).view(torch.uint8).flatten() for name in names])

    def draft_tensors(self) -> list[str]:
        """Names of the tensors that belong to draft stages and are not read."""
        return [name for name in self.shard_of if name.startswith(DRAFT_PREFIX)]

    def close(self) -> None:
        """Releases the shards' descriptors."""
        for shard in self._shards.values():
            shard.close()

    def _read_index(self) -> dict[str, str]:
        path = self.directory / INDEX
        index = read_json(path)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{path}: no weight_map from names to shards, expected one; {REMEDY}")
        for shard in sorted(set(weight_map.values())):
            if shard in ("", ".", "..") or "/" in shard or not shard.isprintable():
                raise CheckpointError(f"{path}: shard {brief(shard)}, expected the name of a file here; {REMEDY}")
        return weight_map

    def _check_tensors(self) -> None:
        experts = self.config.num_hidden_layers * self.config.n_routed_experts
        least = experts * len(expert_tensors(self.config, 0, 0))
        if least > len(self.shard_of):  # before a table of that size is built
            raise CheckpointError(
                f"{self.directory / INDEX}: {len(self.shard_of):,} tensors, expected more than the {least:,} of the {experts:,} experts in config.json; {REMEDY}"
            )
        expected = model_tensors(self.config)
        unknown = [name for name in self.shard_of if name not in expected and not name.startswith(DRAFT_PREFIX)]
        if unknown:
            raise CheckpointError(
                f"{self.directory / INDEX}: {len(unknown)} tensors that config.json does not imply, first {unknown[0]!r}, expected none; the config belongs to another checkpoint"
            )
        for name, spec in expected.items():
            self._check_tensor(name, spec)

    def _check_tensor(self, name: str, expected: TensorSpec) -> None:
        if name not in self.shard_of:
            raise CheckpointError(f"{self.directory / INDEX}: tensor {name} is missing, expected {expected}; {REMEDY}")
        if self.shard_of[name] in self.consumed:
            return
        shard = self._shards[self.shard_of[name]]
        entry = shard.entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{shard.path}: tensor {name} is missing, the index says it lies here as {expected}; {REMEDY}"
            )
        if entry.spec != expected:
            raise CheckpointError(
                f"{shard.path}: tensor {name} is {entry.spec}, expected {expected}; shard and config.json are of different models, {REMEDY}"
            )


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor]], shard_bytes: int
) -> None:
    """Writes a checkpoint in the released form that `Checkpoint` and other programs read.

    Args:
        directory: Created when missing; existing shards are overwritten.
        config: Content of `config.json`.
        tensors: Raw names with tensors in their released dtypes, consumed once; FP4 codes int8, scales float8_e8m0fnu.
        shard_bytes: A shard's payload never exceeds this unless one tensor alone does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shards = list(_into_shards(tensors, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / name)
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=0) + "\n", encoding="utf-8")


def _into_shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor.contiguous()
        held += tensor.nbytes
    if shard:
        yield shard
