"""From a directory and options to a Session: what is loaded, in which order, and which options can be met. Owns no step of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.artifact import MANIFEST, ModelDirectory
from runtime.checkpoint import INDEX, Checkpoint
from runtime.config import ModelConfig
from runtime.demo import DEMO_NAME, prepared_demo
from runtime.devices import compute_device
from runtime.engine import Session
from runtime.errors import ArtifactError, StrawError
from runtime.ladder import check_precisions, parse_ladder
from runtime.models.deepseek_v4.build import build_model
from runtime.models.deepseek_v4.state import State
from runtime.models.rounding import ActivationRounding
from runtime.predictors import OFF, prefetcher_maker
from runtime.resident import ResidentExperts
from runtime.store.assemble import StoreSettings, open_store
from runtime.store.pools import Shares, parse_bytes, parse_slots
from runtime.store.tuned import AUTO, read_tuned
from runtime.tokenizer import load_tokenizer

DEFAULT_CONTEXT = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_model(  # noqa: PLR0913 - the public API: one keyword an option
    model: str | Path = DEMO_NAME,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    ladder: str = "exact",
    renormalise: bool = True,
    code: str | None = None,
    slots: str | Sequence[int] | None = None,
    vram: str | int | None = None,
    ram: str | int | None = None,
    shares: Shares | None = None,
    context: int | None = None,
    prefetch: str = "off",
    verify_reads: bool = False,
    mirrors: Sequence[str | Path] = (),
    rounding: ActivationRounding | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Session:
    """A Session on a model directory, a released checkpoint that fits in memory, or "demo", the shipped model.

    Args:
        model: A directory, or "demo", which is prepared on first use.
        device: "cpu", "cuda" or "cuda:i".
        dtype: "float32" or "bfloat16"; None is float32 on the CPU and bfloat16 on CUDA.
        ladder: "exact", "a,b", "mass:hi,lo", or "auto": as `runtime tune` left it, else exact where every expert fits
            at FP4, else 2,4.
        renormalise: Whether the picks that are left carry the weight of those dropped.
        code: The 2-bit code to use, "int2", "quad2" or "split"; None is the model directory's own.
        slots: Experts held: at FP4 in VRAM and RAM, then at 2-bit only in VRAM and RAM; "F,R,f,r" or four counts.
        vram: Budget of bytes for all that the process uses on the device, or text like "24GB"; None is what is free.
        ram: Likewise in host memory.
        shares: What FP4 gets of the bytes for slots in VRAM and RAM; None is as `runtime tune` left it, else the defaults.
        context: Tokens of the longest sequence; None is min(4096, max_position_embeddings).
        prefetch: "off", "hash" (layers whose experts the token id gives) or "predictor" (those, and trained guesses), or
            "auto": as `runtime tune` left it, else off.
        verify_reads: Check the CRC-32 of every slab that is read.
        mirrors: More directories with the same expert files, best on other drives: a slab is read from all of them at once.
        rounding: Activation rounding of the official code; None is off.
        warn: Takes one line that the user should see.

    Raises:
        StrawError: The directory, the device or an option is not usable; one line that says why.
    """
    place, rounding = torch.device(compute_device(device)), rounding or ActivationRounding()
    number = _dtype(dtype, place)
    directory = prepared_demo() if model == DEMO_NAME else Path(model)
    source = open_source(directory)
    try:
        prefetch = _prefetch(prefetch, source)
        tokenizer = load_tokenizer(directory)
        state = State(source.config, _context(context, source.config), number, place)
        # A card's memory is for experts; on the CPU the dense weights are small beside them and speed counts.
        weights = build_model(source, number, place, rounding, keep_fp8=place.type == "cuda")
        if isinstance(source, Checkpoint):
            _refuse_streaming(directory, prefetch=prefetch != "off", slots=slots, vram=vram, code=code, mirror=mirrors)
            experts = _resident(source, ladder, number, place, rounding)
            return Session(weights, experts, state, tokenizer, directory)
        settings = StoreSettings(
            ladder=ladder,
            renormalise=renormalise,
            code=code,
            slots=parse_slots(slots),
            vram_bytes=parse_bytes(vram),
            ram_bytes=parse_bytes(ram),
            shares=shares,
            verify_reads=verify_reads,
            mirrors=[Path(mirror) for mirror in mirrors],
        )
        store = open_store(
            source,
            settings,
            dtype=number,
            device=place,
            round_inputs=rounding.linear,
            used_bytes=_tensor_bytes([weights, state.layers], place.type),
            new_prefetcher=prefetcher_maker(prefetch, source, weights, number, place),
            warn=warn,
        )
        return Session(weights, store, state, tokenizer, directory)
    except BaseException:
        source.close()
        raise


def _prefetch(prefetch: str, source: Checkpoint | ModelDirectory) -> str:
    """The choice itself; "auto" is `runtime.toml`'s, or off."""
    if prefetch != AUTO:
        return prefetch
    return OFF if isinstance(source, Checkpoint) else read_tuned(source.directory).prefetch or OFF


def _refuse_streaming(directory: Path, **options: object) -> None:
    """Raises StrawError if an option is given that means nothing where all experts are resident."""
    for name, value in options.items():
        if value:
            raise StrawError(
                f"--{name}: {directory} is a released checkpoint, whose experts are all held in memory, expected a model directory; run: prep layout {directory} MODEL"
            )


def _resident(
    source: Checkpoint, ladder: str, dtype: torch.dtype, device: torch.device, rounding: ActivationRounding
) -> ResidentExperts:
    """All experts of a released checkpoint, which has FP4 only."""
    num_picks = source.config.num_experts_per_tok
    if ladder != AUTO:
        check_precisions(parse_ladder(ladder, num_picks), num_picks, has_two_bit=False, model=str(source.directory))
    experts = ResidentExperts(source, dtype, device, rounding.linear)
    source.close()
    return experts


def _tensor_bytes(part: object, kind: str) -> int:
    """Bytes of all tensors on devices of this kind in nested dataclasses, tuples and lists."""
    if isinstance(part, Tensor):
        return part.nbytes if part.device.type == kind else 0
    if is_dataclass(part):
        part = [getattr(part, item.name) for item in fields(part)]
    return sum(_tensor_bytes(item, kind) for item in part) if isinstance(part, list | tuple) else 0


def open_source(directory: Path) -> Checkpoint | ModelDirectory:
    """The model directory or released checkpoint in `directory`.

    Raises:
        StrawError: It is neither, or damaged.
    """
    if (directory / MANIFEST).exists():
        return ModelDirectory(directory)
    if (directory / INDEX).exists():
        return Checkpoint(directory)
    found = "no such directory" if not directory.is_dir() else f"neither {MANIFEST} nor {INDEX} in it"
    raise ArtifactError(
        f"{directory}: {found}, expected a model directory or a released checkpoint; run: prep layout CHECKPOINT MODEL"
    )


def _dtype(name: str | None, device: torch.device) -> torch.dtype:
    if name is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise StrawError(f"dtype is {name!r}, expected {' or '.join(DTYPES)}; correct --dtype")
    return DTYPES[name]


def _context(context: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if context is None:
        return min(DEFAULT_CONTEXT, longest)
    if not 1 <= context <= longest:
        raise StrawError(f"context is {context:,} tokens, expected 1 to {longest:,}; correct --context")
    return context
