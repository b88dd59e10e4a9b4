"""The demo's training forward: the V4-Flash function on plain tensors under their released names.

Written for throughput of long batches, not for decoding: the window is taken in blocks of 128 queries, Sinkhorn runs
with the tokens innermost, and the indexer is left out, because with at most 4 * index_topk positions every compressed
entry is picked. The weights are one dict, released name -> float32 master; the routed experts of a layer are stacked as
`layers.N.ffn.experts.w1` and so on. Formulas are those of the released model; `check.py` compares with transformers.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.checkpoint import dense_tensors
from runtime.config import ModelConfig

Weights = dict[str, Tensor]
BLOCK = 128  # queries of one attention block; equals the sliding window
EPSILON = 1e-6
STREAMS = 4


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """Fresh float32 masters and the integer hash tables, on the CPU."""
    random = torch.Generator().manual_seed(seed)
    shapes = {n: s.shape for n, s in dense_tensors(config).items() if not n.endswith(".scale")}
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    for layer in range(config.num_hidden_layers):
        shapes[f"layers.{layer}.ffn.experts.w1"] = (experts, width, hidden)
        shapes[f"layers.{layer}.ffn.experts.w3"] = (experts, width, hidden)
        shapes[f"layers.{layer}.ffn.experts.w2"] = (experts, hidden, width)
    return {name: _initial(name, shape, config, random) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], config: ModelConfig, random: torch.Generator) -> Tensor:
    if name.endswith("tid2eid"):
        return hash_table(config, random)
    if name.endswith(("norm.weight", "_scale")):
        return torch.ones(shape)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return torch.cat(
            [torch.zeros(2 * STREAMS), 3 * torch.eye(STREAMS).flatten()]
        )  # streams start near the identity
    if name.endswith(("_base", ".ape", "attn_sink", "gate.bias")):
        return torch.zeros(shape)
    scale = (
        0.005 if name.endswith(("wo_b.weight", "w2", "w2.weight")) else 0.02
    )  # what writes to the streams starts small
    return scale * torch.randn(shape, generator=random)


def hash_table(config: ModelConfig, random: torch.Generator) -> Tensor:
    """[vocabulary, top-k] int64: distinct experts per token, each expert named equally often over the vocabulary."""
    experts, picks = config.n_routed_experts, config.num_experts_per_tok
    rounds = math.ceil(config.vocab_size * picks / experts)
    slices = [torch.randperm(experts, generator=random).view(-1, picks) for _ in range(rounds)]
    return torch.cat(slices)[: config.vocab_size].contiguous()


def rope_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """[rope / 2] angles per position: plain on sliding layers; YaRN on compressed ones, at every length, amplitude 1."""
    width = config.qk_rope_head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    if not compressed:
        return (config.rope_theta**-exponents).float()
    base, yarn = config.compress_rope_theta, config.rope_scaling
    assert yarn is not None

    def turns_at(turns: float) -> float:
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(turns_at(yarn.beta_fast)), math.ceil(turns_at(yarn.beta_slow))
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    plain = base**-exponents
    return (plain * (1 - ramp) + plain / yarn.factor * ramp).float()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in x's dtype."""
    return F.linear(x, weight.to(x.dtype))


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """x over its root mean square, times weight; float32 inside, x's dtype outside."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (wide if weight is None else wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the interleaved pairs of the trailing channels of x [..., d]; cos and sin broadcast to [..., rope / 2]."""
    rope = 2 * cos.shape[-1]
    even, odd = x[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-rope], turned.to(x.dtype)], -1)


def hyper_pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of streams [N, 4, D]: the sublayer's input [N, D], post [N, 4] and the mixing matrix [4, 4, N] (tokens last)."""
    flat = streams.float().flatten(1)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPSILON)
    pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4]) + EPSILON
    post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
    logits = (z[:, 8:] * scale[2] + base[8:]).t().reshape(STREAMS, STREAMS, -1)
    hidden = (pre[:, :, None] * streams).sum(1).to(streams.dtype)
    return hidden, post, logits.contiguous()


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Row softmax, then alternating column and row normalisation of [4 rows, 4 columns, N]; ends on columns."""
    matrix = torch.softmax(logits, 1) + EPSILON
    matrix = matrix / (matrix.sum(0, keepdim=True) + EPSILON)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(1, keepdim=True) + EPSILON)
        matrix = matrix / (matrix.sum(0, keepdim=True) + EPSILON)
    return matrix


def hyper_post(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Stream k becomes post_k * output + sum over j of mix[j, k] * stream j; float32 inside."""
    mixed = []
    for k in range(STREAMS):
        total = post[:, k, None] * output.float()
        for j in range(STREAMS):
            total = total + mix[j, k, :, None] * streams[:, j].float()
        mixed.append(total)
    return torch.stack(mixed, 1).to(streams.dtype)


def compress(a: Tensor, w: Weights, ratio: int, cos: Tensor, sin: Tensor) -> Tensor:
    """The compressed entries [B, T / ratio, d] of normalised inputs a [B, T, D]; cos and sin are the layer's tables."""
    stem = "attn.compressor"
    values = linear(a, w[f"{stem}.wkv.weight"]).unflatten(1, (-1, ratio))
    gates = linear(a, w[f"{stem}.wgate.weight"]).unflatten(1, (-1, ratio)).float() + w[f"{stem}.ape"]
    if ratio == 4:  # the A half of the window before, the B half of its own
        half = values.shape[-1] // 2
        values = torch.cat([F.pad(values[:, :-1, :, :half], (0, 0, 0, 0, 1, 0)), values[..., half:]], 2)
        before = F.pad(gates[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        gates = torch.cat([before, gates[..., half:]], 2)
    pooled = (values.float() * gates.softmax(2)).sum(2).to(a.dtype)
    return rotate(rms(pooled, w[f"{stem}.norm.weight"]), cos[::ratio], sin[::ratio])


def attend(q: Tensor, kv: Tensor, entries: Tensor | None, ratio: int, sink: Tensor) -> Tensor:
    """Windowed attention with compressed entries and a sink: q [B, T, H, d], kv [B, T, d] -> [B, T, H, d].

    A block of 128 queries sees its own and the previous 128 keys (masked to the last 128 of each query), and each entry
    whose last token is not later than the query.
    """
    batch, length, heads, width = q.shape
    blocks = length // BLOCK
    q = q.reshape(batch, blocks, BLOCK * heads, width) * width**-0.5
    own = kv.view(batch, blocks, BLOCK, width)
    keys = torch.cat([F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own], 2)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(_outside_window(blocks, heads, q.device), float("-inf"))
    parts = [sink.repeat(BLOCK)[None, None, :, None].expand(batch, blocks, -1, 1), scores]
    if entries is not None:
        future = _unfinished(length, heads, entries.shape[1], ratio, q.device)
        more = (q.flatten(1, 2) @ entries.transpose(-1, -2)).view(batch, blocks, BLOCK * heads, -1)
        parts.append(more.float().masked_fill(future, float("-inf")))
    chances = torch.softmax(torch.cat(parts, -1), -1).to(q.dtype)
    output = chances[..., 1 : 1 + 2 * BLOCK] @ keys
    if entries is not None:
        output = output + (chances[..., 1 + 2 * BLOCK :].flatten(1, 2) @ entries).view_as(output)
    return output.view(batch, length, heads, width)


def _outside_window(blocks: int, heads: int, device: torch.device) -> Tensor:
    query = torch.arange(BLOCK, device=device).repeat_interleave(heads)[:, None]
    key = torch.arange(2 * BLOCK, device=device)[None]
    outside = (key <= query) | (key > query + BLOCK)
    first = torch.arange(blocks, device=device)[:, None, None] == 0
    return outside | (first & (key < BLOCK))


def _unfinished(length: int, heads: int, entries: int, ratio: int, device: torch.device) -> Tensor:
    position = torch.arange(length, device=device).repeat_interleave(heads).view(-1, BLOCK * heads, 1)
    return torch.arange(entries, device=device) >= (position + 1) // ratio


def attention(a: Tensor, w: Weights, config: ModelConfig, ratio: int, cos: Tensor, sin: Tensor) -> Tensor:
    """The attention sublayer on normalised inputs a [B, T, D]."""
    heads, width = config.num_attention_heads, config.head_dim
    latent = rms(linear(a, w["attn.wq_a.weight"]), w["attn.q_norm.weight"])
    q = rms(linear(latent, w["attn.wq_b.weight"]).unflatten(-1, (heads, width)))
    q = rotate(q, cos[:, None], sin[:, None])
    kv = rotate(rms(linear(a, w["attn.wkv.weight"]), w["attn.kv_norm.weight"]), cos, sin)
    entries = compress(a, w, ratio, cos, sin) if ratio else None
    out = rotate(attend(q, kv, entries, ratio, w["attn.attn_sink"]), cos[:, None], -sin[:, None])
    grouped = out.flatten(2).unflatten(-1, (config.o_groups, -1))
    down = w["attn.wo_a.weight"].to(a.dtype).view(config.o_groups, config.o_lora_rank, -1)
    return linear(torch.einsum("btgi,goi->btgo", grouped, down).flatten(2), w["attn.wo_b.weight"])


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu of the gate clamped from above, times the clamped up projection."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


def shared_expert(x: Tensor, w: Weights, limit: float) -> Tensor:
    """The expert that every token passes."""
    gate, up = (linear(x, w[f"ffn.shared_experts.{name}.weight"]) for name in ("w1", "w3"))
    return linear(swiglu(gate, up, limit).to(x.dtype), w["ffn.shared_experts.w2.weight"])


class Spread(torch.autograd.Function):
    """rows[order // k] of x [N, D] -> [N * k, D]; the gradient gathers by the inverse order instead of adding atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.picks = order.numel() // x.shape[0]
        return x[order // ctx.picks]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.picks)).float().sum(1).to(grad.dtype), None, None


class Unsort(torch.autograd.Function):
    """y[inverse], whose gradient is grad[order]: both directions are gathers."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y[inverse]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of x, sorted by expert and ending at `ends`, each times its expert's matrix of weight [E, out, in]."""
    if x.is_cuda:
        return F.grouped_mm(x, weight.to(x.dtype).transpose(-1, -2), offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ weight[e].T for e, (a, b) in enumerate(itertools.pairwise(starts))])


def routed_experts(x: Tensor, w: Weights, picks: Tensor, gates: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Sum of the picked experts' outputs [N, D], and how many tokens each expert got."""
    experts = w["ffn.experts.w1"].shape[0]
    order = picks.flatten().argsort()
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    load = torch.bincount(picks.flatten(), minlength=experts)
    ends = load.cumsum(0).int()
    rows = Spread.apply(x, order, inverse)
    gate_up = grouped_linear(rows, torch.cat([w["ffn.experts.w1"], w["ffn.experts.w3"]], 1), ends)
    inner = _gated(gate_up, gates.flatten()[order], limit)
    out = Unsort.apply(grouped_linear(inner, w["ffn.experts.w2"], ends), order, inverse)
    return out.unflatten(0, (-1, picks.shape[1])).float().sum(1).to(x.dtype), load


def _gated(gate_up: Tensor, gates: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (swiglu(gate, up, limit) * gates[:, None]).to(gate_up.dtype)


def route(x: Tensor, w: Weights, config: ModelConfig, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Picks [N, k] and their weights: by table on hash layers, else the top of score plus balancing bias; float32."""
    scores = F.softplus(F.linear(x.float(), w["ffn.gate.weight"])).sqrt()
    if "ffn.gate.tid2eid" in w:
        picks = w["ffn.gate.tid2eid"][ids]
    else:
        picks = (scores.detach() + w["ffn.gate.bias"]).topk(config.num_experts_per_tok, dim=-1).indices
    gates = scores.gather(1, picks)
    return picks, config.routed_scaling_factor * gates / (gates.sum(-1, keepdim=True) + 1e-20)


class Model:
    """The forward over a dict of weights that the caller owns and may change in place between calls.

    `observe(layer, picks, gates)` is called with every router's choice when it is set.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, compiled: bool) -> None:
        """Holds views of `weights`; `compiled` fuses the parts between the expert products with torch.compile."""
        self.config, self.weights, self.dtype = config, weights, dtype
        self.observe: Callable[[int, Tensor, Tensor], None] | None = None
        self.loads: list[Tensor] = []
        names = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
        self.layers = [{n[len(p) :]: t for n, t in weights.items() if n.startswith(p)} for p in names]
        self._cached_tables: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}
        wrap: Callable[[Any], Any] = _compile if compiled else lambda function: function
        self._attention_half, self._routing = wrap(_attention_half), wrap(_routing)
        self._experts, self._close, self._head = routed_experts, wrap(_close), wrap(_head_loss)

    def losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy [B * T] in nats of targets [B, T] given ids [B, T]; T is a multiple of 128."""
        streams = self._embed(ids)
        self.loads = []
        for layer, w in enumerate(self.layers):
            ratio = self.config.layer_ratios[layer]
            cos, sin = self._tables(ids, ratio)
            streams = self._attention_half(streams, w, self.config, ratio, cos, sin)
            x, post, mix, picks, gates = self._routing(streams, w, self.config, ids.flatten())
            if self.observe:
                self.observe(layer, picks, gates)
            routed, load = self._experts(x, w, picks, gates, self.config.swiglu_limit)
            self.loads.append(load)
            streams = self._close(streams, x, routed, post, mix, w, self.config.swiglu_limit)
        return self._head(streams, self.weights, targets.flatten())

    def _embed(self, ids: Tensor) -> Tensor:
        embedded = F.embedding(ids.flatten(), self.weights["embed.weight"]).to(self.dtype)
        return embedded[:, None].expand(-1, STREAMS, -1).contiguous()

    def _tables(self, ids: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        key = (ids.shape[1], ratio > 0)
        if key not in self._cached_tables:
            angles = torch.arange(ids.shape[1])[:, None] * rope_frequencies(self.config, ratio > 0)
            self._cached_tables[key] = angles.cos().to(ids.device), angles.sin().to(ids.device)
        return self._cached_tables[key]


def _compile(function: Any) -> Any:
    """torch.compile with fixed shapes: one graph per layer kind and row length, all kept."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False)


def _attention_half(streams: Tensor, w: Weights, config: ModelConfig, ratio: int, cos: Tensor, sin: Tensor) -> Tensor:
    hidden, post, logits = hyper_pre(streams, w["hc_attn_fn"], w["hc_attn_base"], w["hc_attn_scale"])
    a = rms(hidden, w["attn_norm.weight"]).view(-1, cos.shape[0], hidden.shape[-1])
    out = attention(a, w, config, ratio, cos, sin).flatten(0, 1)
    return hyper_post(streams, out, post, sinkhorn(logits, config.hc_sinkhorn_iters))


def _routing(streams: Tensor, w: Weights, config: ModelConfig, ids: Tensor) -> tuple[Tensor, ...]:
    hidden, post, logits = hyper_pre(streams, w["hc_ffn_fn"], w["hc_ffn_base"], w["hc_ffn_scale"])
    x = rms(hidden, w["ffn_norm.weight"])
    picks, gates = route(x, w, config, ids)
    return x, post, sinkhorn(logits, config.hc_sinkhorn_iters), picks, gates


def _close(streams: Tensor, x: Tensor, routed: Tensor, post: Tensor, mix: Tensor, w: Weights, limit: float) -> Tensor:
    return hyper_post(streams, routed + shared_expert(x, w, limit), post, mix)


def _head_loss(streams: Tensor, weights: Weights, targets: Tensor) -> Tensor:
    flat = streams.float().flatten(1)
    z = F.linear(flat, weights["hc_head_fn"]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPSILON)
    pre = torch.sigmoid(z * weights["hc_head_scale"] + weights["hc_head_base"]) + EPSILON
    hidden = rms((pre[:, :, None] * streams).sum(1).to(streams.dtype), weights["norm.weight"])
    return F.cross_entropy(linear(hidden, weights["head.weight"]).float(), targets, reduction="none")
