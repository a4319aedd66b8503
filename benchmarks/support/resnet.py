"""Defines the residual networks ResNet-18 and ResNet-50 (He et al. 2016)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Block(nn.Module):
    """A residual block with two 3x3 convolutions or, with `bottleneck`, with 1x1, 3x3 and 1x1 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            parts = [*_conv(inputs, width, 1), nn.ReLU(True), *_conv(width, width, 3, stride), nn.ReLU(True)]
            parts += _conv(width, outputs, 1)
        else:
            parts = [*_conv(inputs, width, 3, stride), nn.ReLU(True), *_conv(width, width, 3)]
        self.body = nn.Sequential(*parts)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def resnet(depth: int, *, channels: int, num_classes: int, width: int = 64) -> nn.Module:
    """Return a ResNet of `depth` 18 or 50, for ImageNet's images with three channels or for 32x32 images with one
    channel.

    With depth 50, three channels and 1,000 classes, it has 25.6 million parameters in 161 tensors; with one channel and
    25 classes, it has 23.6 million (depth 50) or 11.2 million (depth 18). `width` is the number of channels of the
    first stage, which is smaller in smoke runs.
    """
    plans = {18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}
    if depth not in plans:
        raise ValueError(f"depth must be 18 or 50, not {depth}")
    blocks, bottleneck = plans[depth]
    layers: list[nn.Module] = (
        [*_conv(1, width, 3), nn.ReLU(True)]
        if channels == 1
        else [*_conv(channels, width, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    )
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for index in range(count):
            stride = 2 if stage and index == 0 else 1
            layers.append(_Block(inputs, inner, stride, bottleneck=bottleneck))
            inputs = 4 * inner if bottleneck else inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
