"""The routers of V4-Flash: learned and by token id, one token first, eight, and a prefill of 512."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.router as op
from kernels.cases import Case
from kernels.router import Picks, RouterWeights, reference

EXPERTS, HIDDEN, TOPK, SCALING, VOCAB = 256, 4096, 6, 1.5, 129_280
FLOAT32_SUMS = 1e-5  # weights see no bfloat16 rounding


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens, a layer's router, and where its picks go; `host` is pinned where there is a card."""

    x: Tensor
    token_ids: Tensor
    router: RouterWeights
    scores: Tensor
    out: Picks
    host: Picks

    def tensors(self) -> list[Tensor]:
        """Everything that a case reads, for a copy of one input's values into another."""
        given = [self.x, self.token_ids, self.router.weight, self.router.bias, self.router.token_to_experts]
        return [tensor for tensor in given if tensor is not None]


def make_inputs(
    num_tokens: int,
    shape: tuple[int, int],
    hashed: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int64,
) -> Inputs:
    """Gaussian tokens and weights [E, D] of `shape`, logits near 1; a bias that decides about as much as the scores do."""
    (num_experts, hidden), generator = shape, torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def picks(where: torch.device) -> Picks:
        pinned, size = where.type == "cpu" and device.type == "cuda", (num_tokens, TOPK)
        experts = torch.empty(size, dtype=index_dtype, device=where, pin_memory=pinned)
        return Picks(experts, torch.empty(size, device=where, pin_memory=pinned))

    vocab = 64 if num_experts < EXPERTS else VOCAB
    first = torch.randint(num_experts, (vocab, 1), generator=generator, device=device)
    table = (first + 37 * torch.arange(TOPK, device=device)) % num_experts if hashed else None
    return Inputs(
        x=random(num_tokens, hidden).to(dtype),
        token_ids=torch.randint(vocab, (num_tokens,), generator=generator, device=device),
        router=RouterWeights(
            (random(num_experts, hidden) / hidden**0.5).to(dtype),
            None if hashed else 0.2 * random(num_experts),
            None if table is None else table.to(index_dtype),
            TOPK,
            SCALING,
        ),
        scores=torch.empty(num_tokens, num_experts, device=device),
        out=picks(device),
        host=picks(torch.device("cpu")),
    )


def run(inputs: Inputs) -> Tensor:
    return op.router(inputs.x, inputs.router, inputs.token_ids, inputs.scores, inputs.out, inputs.host).weights


def definition(inputs: Inputs) -> Tensor:
    weight, bias, table, topk, scaling = inputs.router
    scores = reference.scores_reference(inputs.x, weight)
    return reference.router_reference(scores, bias, table, inputs.token_ids, topk, scaling)[1]


def cases() -> list[Case]:
    """Decode first."""
    return [_case(num_tokens, hashed) for num_tokens in (1, 8, 512) for hashed in (False, True)]


def _case(num_tokens: int, hashed: bool) -> Case:
    return Case(
        op="router",
        name=f"{'by token id' if hashed else 'learned'} T={num_tokens} {EXPERTS}x{HIDDEN} bf16",
        make=lambda seed, device: make_inputs(num_tokens, (EXPERTS, HIDDEN), hashed, seed, device),
        run=run,
        reference=definition,
        read_bytes=EXPERTS * HIDDEN * 2 + num_tokens * HIDDEN * 2,
        tolerance=FLOAT32_SUMS,
    )
