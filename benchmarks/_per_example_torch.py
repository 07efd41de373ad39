"""The GPT of `_per_example.py` for torch, and a step of Opacus' ghost clipping."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (y.reshape(shape).transpose(1, 2) for y in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Network(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # A row of places for each example: Opacus counts examples along the first axis.
        places = torch.arange(ids.shape[1]).expand_as(ids).contiguous()
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place(places))))


def network(*sizes: int) -> nn.Module:
    return Network(*sizes)


def ordinary_step(net: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    def step() -> None:
        net.zero_grad(set_to_none=True)
        logits = net(ids)[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()

    return step


def ghost_step(net: nn.Module, ids: torch.Tensor) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, use_ghost_clipping=True)

    def step() -> None:
        """Both backward passes, as `DPLossFastGradientClipping` takes them, without its noise."""
        wrapped.zero_grad(set_to_none=True)
        logits = wrapped(ids)[:, :-1]
        losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        losses = losses.mean(1)
        losses.mean().backward(retain_graph=True)
        net.zero_grad(set_to_none=True)
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * losses).mean().backward()
        wrapped.enable_hooks()

    return step
