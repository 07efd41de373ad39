"""The models of `_per_example_models.py` for torch, and a step of Opacus' ghost clipping.

Opacus has no shared weights, so the head of a GPT is not tied, and no bare parameters, so places
are an embedding. Its LSTM is `DPLSTM`; the ordinary gradient takes torch's own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def dense(width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=False)


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def attended(qkv: torch.Tensor, heads: int, is_causal: bool) -> torch.Tensor:
    parts = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in qkv.chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(*parts, is_causal=is_causal)
    return mixed.transpose(1, 2).flatten(2)


def places(x: torch.Tensor) -> torch.Tensor:
    """A row of places for each example: Opacus counts examples along the first axis."""
    return torch.arange(x.shape[1]).expand(x.shape[:2]).contiguous()


def patches(images: torch.Tensor) -> torch.Tensor:
    """Channels first, in squares of four."""
    return functional.unfold(images, 4, stride=4).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = dense(width, 3 * width)
        self.out = dense(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended(self.qkv(self.norm1(x)), self.heads, True))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = dense(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(places(ids))
        return self.head(self.norm(self.blocks(x)))[:, :-1]


class ViTBlock(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.qkv, self.out = dense(n, 3 * n), dense(n, n)
        self.up, self.down = dense(n, 4 * n), dense(4 * n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(attended(self.qkv(normed(x)), 4, False))
        return x + self.down(functional.gelu(self.up(normed(x))))


class ViT(nn.Module):
    def __init__(self, n: int = 192) -> None:
        super().__init__()
        self.patch, self.place, self.head = dense(48, n), nn.Embedding(64, n), dense(n, 10)
        self.blocks = nn.Sequential(*(ViTBlock(n) for _ in range(4)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(patches(images))
        return self.head(normed(self.blocks(x + self.place(places(x)))).mean(1))


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.skip = nn.Conv2d(a, b, 1, stride, bias=False)
        self.norm = nn.GroupNorm(8, b)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + functional.relu(self.norm(self.kernel(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths, strides = [64, 64, 64, 128, 128, 256, 256], [1, 1, 2, 1, 2, 1]
        self.stem, self.head = nn.Conv2d(3, 64, 3, padding=1, bias=False), dense(256, 10)
        layers = zip(widths[:-1], widths[1:], strides, strict=True)
        self.layers = nn.Sequential(*(Residual(*sizes) for sizes in layers))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


class LSTM(nn.Module):
    def __init__(self, cell: type[nn.Module], n: int = 256, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, n), dense(n, vocabulary)
        self.cell = cell(n, n, batch_first=True, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embed(ids[:, :-1].contiguous()))[0])


class MixerBlock(nn.Module):
    def __init__(self, n: int, t: int) -> None:
        super().__init__()
        self.into, self.out = dense(t, 128), dense(128, t)
        self.up, self.down = dense(n, 2 * n), dense(2 * n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(functional.gelu(self.into(normed(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.down(functional.gelu(self.up(normed(x))))


class Mixer(nn.Module):
    def __init__(self, n: int = 256) -> None:
        super().__init__()
        self.patch, self.head = dense(48, n), dense(n, 10)
        self.blocks = nn.Sequential(*(MixerBlock(n, 64) for _ in range(4)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(normed(self.blocks(self.patch(patches(images)))).mean(1))


def network(model: str, is_private: bool) -> nn.Module:
    if model == "LSTM" and is_private:
        from opacus.layers import DPLSTM

        return LSTM(DPLSTM)
    networks: dict[str, Callable[[], nn.Module]] = {
        "GPT": lambda: GPT(4, 128, 4, 2048, 64),
        "GPT, wide": lambda: GPT(2, 512, 8, 8192, 32),
        "ViT": ViT,
        "ResNet, group norm": ResNet,
        "LSTM": lambda: LSTM(nn.LSTM),
        "Mixer": Mixer,
    }
    return networks[model]()


def tensors(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and the labels or next tokens."""
    if isinstance(batch, tuple):
        images, labels = batch
        channels_first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
        return torch.from_numpy(channels_first), torch.from_numpy(labels)
    ids = torch.from_numpy(batch).long()
    return ids, ids[:, 1:]


def losses(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(net(inputs).movedim(-1, 1), targets, reduction="none")
    return each.reshape(len(each), -1).mean(1)


def ordinary_step(model: str, batch: Any) -> Callable[[], Any]:
    net, data = network(model, False), tensors(batch)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        losses(net, *data).mean().backward()

    return step


def ghost_step(model: str, batch: Any) -> Callable[[], Any]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    net, data = network(model, True), tensors(batch)
    wrapped = GradSampleModuleFastGradientClipping(net, max_grad_norm=1.0, use_ghost_clipping=True)

    def step() -> None:
        """Both backward passes, as `DPLossFastGradientClipping` takes them, without its noise."""
        wrapped.zero_grad(set_to_none=True)
        each = losses(wrapped, *data)
        each.mean().backward(retain_graph=True)
        net.zero_grad(set_to_none=True)
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * each).mean().backward()
        wrapped.enable_hooks()

    return step
