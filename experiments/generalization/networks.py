"""Small networks with and without batch normalization and with depthwise layers."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.support.resnet import resnet

NETWORKS = ("vgg", "residual", "depthwise", "resnet18", "resnet50")


class Vgg(nn.Sequential):
    """Three convolutions and two dense layers, no normalization, dropout 0.2."""

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
    """A stem and one residual block, each convolution with batch normalization."""

    def __init__(self, num_classes: int, side: int, width: int = 12) -> None:
        super().__init__()
        self.stem = _conv_bn(1, width, stride=2 if side >= 16 else 1)
        self.first, self.second = _conv_bn(width, width), _conv_bn(width, width)
        self.head = nn.Linear(width * 16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes) of images (n, 1, side, side)."""
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
        """Logits (n, classes) of images (n, 1, side, side)."""
        x = self.blocks(F.relu(self.stem(images)))
        return cast(torch.Tensor, self.head(F.adaptive_avg_pool2d(x, 4).flatten(1)))


def _conv_bn(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def _separable(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    depth = _conv_bn(inputs, inputs, stride=stride, groups=inputs)
    return nn.Sequential(depth, nn.ReLU(), _conv_bn(inputs, outputs, kernel=1), nn.ReLU())


def build(name: str, *, num_classes: int, side: int) -> nn.Module:
    """A freshly initialised network; seed torch before for a repeatable one."""
    if name in ("resnet18", "resnet50"):
        return _channels_last(resnet(int(name.removeprefix("resnet")), channels=1, num_classes=num_classes))
    kinds = {"vgg": Vgg, "residual": Residual, "depthwise": Depthwise}
    if name not in kinds:
        raise ValueError(f"network {name!r} is unknown: choose one of {', '.join(NETWORKS)}")
    return _channels_last(kinds[name](num_classes, side))


def _channels_last(network: nn.Module) -> nn.Module:
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing from torch's types
    return network
