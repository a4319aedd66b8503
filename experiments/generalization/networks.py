"""Defines the networks: small convolutional networks with and without normalization, and a transformer."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.support.resnet import resnet

NETWORKS = ("vgg", "residual", "depthwise", "resnet20", "resnet18", "resnet50", "transformer")


class Vgg(nn.Sequential):
    """Three convolutions and two dense layers without normalization, with dropout 0.2."""

    def __init__(self, num_classes: int, side: int, width: int = 8) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, stride=2 if side >= 16 else 1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * width, 96),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(96, num_classes),
        )


class Residual(nn.Module):
    """A stem and one residual block, with batch normalization after each convolution."""

    def __init__(self, num_classes: int, side: int, width: int = 12) -> None:
        super().__init__()
        self.stem = _conv_bn(1, width, stride=2 if side >= 16 else 1)
        self.first, self.second = _conv_bn(width, width), _conv_bn(width, width)
        self.head = nn.Linear(width * 16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) for images (n, 1, side, side)."""
        x = F.relu(self.stem(images))
        x = F.relu(x + self.second(F.relu(self.first(x))))
        return cast(torch.Tensor, self.head(F.adaptive_avg_pool2d(x, 4).flatten(1)))


class Depthwise(nn.Module):
    """A stem and two depthwise-separable blocks with batch normalization."""

    def __init__(self, num_classes: int, side: int, width: int = 12) -> None:
        super().__init__()
        self.stem = _conv_bn(1, width, stride=2 if side >= 16 else 1)
        self.blocks = nn.Sequential(_separable(width, 2 * width, stride=2), _separable(2 * width, 3 * width))
        self.head = nn.Linear(3 * width * 16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) for images (n, 1, side, side)."""
        x = self.blocks(F.relu(self.stem(images)))
        return cast(torch.Tensor, self.head(F.adaptive_avg_pool2d(x, 4).flatten(1)))


class ResNet20(nn.Module):
    """The residual network of 20 layers (He et al. 2016) with 16, 32 and 64 channels and over 270,000 parameters."""

    def __init__(self, num_classes: int, side: int) -> None:
        super().__init__()
        self.stem = _conv_bn(1, 16, stride=2 if side >= 16 else 1)
        plan = [(16, 1), (16, 1), (16, 1), (32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)]
        self.first, self.second, self.shortcuts = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        width = 16
        for channels, stride in plan:
            self.first.append(_conv_bn(width, channels, stride=stride))
            self.second.append(_conv_bn(channels, channels))
            same = width == channels
            self.shortcuts.append(nn.Identity() if same else _conv_bn(width, channels, kernel=1, stride=stride))
            width = channels
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, classes) for images (n, 1, side, side)."""
        x = F.relu(self.stem(images))
        for first, second, shortcut in zip(self.first, self.second, self.shortcuts, strict=True):
            x = F.relu(shortcut(x) + second(F.relu(first(x))))
        return cast(torch.Tensor, self.head(x.mean((2, 3))))


class Transformer(nn.Module):
    """A causal transformer over bytes, with two layers of width 64 and layer normalization before each part."""

    def __init__(self, num_classes: int, side: int, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(num_classes, width), nn.Parameter(torch.randn(side, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return logits (n, bytes, length) for the byte that follows each byte of `text` (n, length)."""
        length = text.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=text.device).triu(1)
        x = self.tokens(text) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return cast(torch.Tensor, self.head(self.norm(x)).transpose(1, 2))


def _conv_bn(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def _separable(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    depth = _conv_bn(inputs, inputs, stride=stride, groups=inputs)
    return nn.Sequential(depth, nn.ReLU(), _conv_bn(inputs, outputs, kernel=1), nn.ReLU())


def build(name: str, *, num_classes: int, side: int) -> nn.Module:
    """Return a newly initialised network; for repeatable weights, seed torch before the call."""
    if name in ("resnet18", "resnet50"):
        return _channels_last(resnet(int(name.removeprefix("resnet")), channels=1, num_classes=num_classes))
    if name == "transformer":
        return Transformer(num_classes, side)
    kinds = {"vgg": Vgg, "residual": Residual, "depthwise": Depthwise, "resnet20": ResNet20}
    if name not in kinds:
        raise ValueError(f"network {name!r} is unknown: use one of {', '.join(NETWORKS)}")
    return _channels_last(kinds[name](num_classes, side))


def _channels_last(network: nn.Module) -> nn.Module:
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from torch's types
    return network
