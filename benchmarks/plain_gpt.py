"""A GPT written by hand on torch's SDPA, with which `DecoderLM` is compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.models.decoder import DecoderConfig

Past = tuple[Tensor, Tensor]


class PlainBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d = config.d_model
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(d, 2)
        q, k, v = (y.view(b, n, self.heads, d // self.heads).transpose(1, 2) for y in (q, k, v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh")), (k, v)


class PlainGPT(nn.Module):
    """GPT-2 with a cache that grows by concatenation. After the prompt, decoding adds one token at a time."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, ids: Tensor, past: list[Past] | None = None, *, last: bool = False) -> tuple[Tensor, list[Past]]:
        start = 0 if past is None else past[0][0].shape[2]
        x = self.token(ids) + self.position(torch.arange(start, start + ids.shape[1]))
        after = []
        for i, block in enumerate(self.blocks):
            x, one = block(x, None if past is None else past[i])
            after.append(one)
        x = self.norm(x[:, -1:] if last else x)
        return x @ self.token.weight.T, after

    def loss(self, ids: Tensor) -> Tensor:
        logits, _ = self(ids[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def take(self, weights: dict[str, Tensor]) -> None:
        """The weights of a `DecoderLM` of the same configuration."""
        names = {
            "embedding": "token", "positions": "position", "attention_norm": "norm_1", "feed_forward_norm": "norm_2",
            "attention.in_proj": "qkv", "attention.out_proj": "proj",
            "feed_forward.up": "up", "feed_forward.down": "down",
        }  # fmt: skip
        renamed = {}
        for name, tensor in weights.items():
            new = name
            for ours, theirs in names.items():
                new = new.replace(f"{ours}.", f"{theirs}.")
            renamed[new] = tensor
        self.load_state_dict(renamed)
