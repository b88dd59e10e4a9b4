"""DeepSeek-V4: token ids and a State in, hidden states and logits out. Owns the dense weights; experts come from a provider."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config import ModelConfig
from runtime.models.deepseek_v4.attention import Attention
from runtime.models.deepseek_v4.hyper_connections import HyperConnection, HyperHead, spread
from runtime.models.deepseek_v4.layers import linear_float32, rms_norm
from runtime.models.deepseek_v4.moe import MixtureOfExperts
from runtime.models.deepseek_v4.state import LayerState, State
from runtime.models.experts import ExpertProvider, RouterObserver

HEAD_ROWS = 16_384  # vocabulary rows upcast to float32 at a time: 268 MB at hidden size 4096


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: attention, then experts, each between a hyper-connection's pre and spread."""

    attn_hc: HyperConnection
    attn_norm: Tensor
    attention: Attention
    ffn_hc: HyperConnection
    ffn_norm: Tensor
    moe: MixtureOfExperts

    def attend(self, streams: Tensor, state: LayerState, position: Tensor, eps: float) -> Tensor:
        """Streams [T, n, D] after the attention half."""
        mixed, mix = self.attn_hc.pre(streams)
        return spread(self.attention(rms_norm(mixed, self.attn_norm, eps), state, position), streams, mix)

    def feed_forward(
        self, streams: Tensor, token_ids: Tensor, experts: ExpertProvider, observer: RouterObserver | None, eps: float
    ) -> Tensor:
        """Streams [T, n, D] after the experts' half."""
        mixed, mix = self.ffn_hc.pre(streams)
        return spread(self.moe(rms_norm(mixed, self.ffn_norm, eps), token_ids, experts, observer), streams, mix)


@dataclass(frozen=True, slots=True)
class DeepseekV4:
    """The model on one device in one dtype. Stateless: what a sequence leaves behind lies in a State."""

    config: ModelConfig
    embed: Tensor
    blocks: tuple[Block, ...]
    hyper_head: HyperHead
    norm: Tensor
    head: Tensor

    def forward(
        self, token_ids: Tensor, state: State, experts: ExpertProvider, observer: RouterObserver | None = None
    ) -> Tensor:
        """Final hidden states [T, D] of the tokens that follow those in `state`, which moves on by T.

        Args:
            token_ids: [T] int64 on the model's device, T >= 1.
            state: Of this model, with room for T tokens; modified in place.
            experts: Serves the routed experts.
            observer: Sees every router's input and picks.
        """
        eps = self.config.rms_norm_eps
        embedded = self.embed[token_ids.to(self.embed.device)].to(
            token_ids.device
        )  # the embedding may stay on the host
        streams = embedded[:, None].expand(-1, self.config.hc_mult, -1)
        for block, layer_state in zip(self.blocks, state.layers, strict=True):
            streams = block.attend(streams, layer_state, state.position, eps)
            streams = block.feed_forward(streams, token_ids, experts, observer, eps)
        state.advance(token_ids.shape[0])
        return rms_norm(self.hyper_head(streams), self.norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, vocab_size] of final hidden states [T, D], the head upcast in pieces."""
        return torch.cat([linear_float32(hidden, rows) for rows in self.head.split(HEAD_ROWS)], -1)
