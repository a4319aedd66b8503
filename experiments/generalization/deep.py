"""ResNet-18 and ResNet-50 for 32x32 images (He et al. 2016, with the small stem), for a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Block(nn.Module):
    def __init__(self, body: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def _block(inputs: int, width: int, stride: int, *, bottleneck: bool) -> _Block:
    outputs = 4 * width if bottleneck else width
    if bottleneck:
        parts = [*_conv(inputs, width, 1), nn.ReLU(), *_conv(width, width, 3, stride), nn.ReLU()]
        parts += _conv(width, outputs, 1)
    else:
        parts = [*_conv(inputs, width, 3, stride), nn.ReLU(), *_conv(width, width, 3)]
    plain = stride == 1 and inputs == outputs
    shortcut = nn.Identity() if plain else nn.Sequential(*_conv(inputs, outputs, 1, stride))
    return _Block(nn.Sequential(*parts), shortcut)


def resnet(depth: int, *, num_classes: int) -> nn.Module:
    """ResNet of `depth` 18 or 50 on one input channel: 11.2 or 23.6 million parameters with 25 classes."""
    plans = {18: ((2, 2, 2, 2), False), 50: ((3, 4, 6, 3), True)}
    if depth not in plans:
        raise ValueError(f"depth is {depth}: choose 18 or 50")
    blocks, bottleneck = plans[depth]
    layers: list[nn.Module] = [*_conv(1, 64, 3), nn.ReLU()]
    inputs = 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True)):
        for index in range(count):
            stride = 2 if stage and index == 0 else 1
            layers.append(_block(inputs, width, stride, bottleneck=bottleneck))
            inputs = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
