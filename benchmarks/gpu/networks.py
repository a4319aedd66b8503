"""Defines the networks to measure: four from torchvision (if it is installed), GPT-2 small and ViT-B."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support.resnet import resnet

CLASSES, SIDE, PATCH = 1000, 224, 16
VISION = ("resnet50", "vgg11", "alexnet", "mobilenet_v3_large")
Batches = Callable[[int, torch.device], tuple[torch.Tensor, torch.Tensor]]


class WithLoss(nn.Module):
    """A network whose forward pass ends with the loss, so that the memory of the loss is included."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(inputs).flatten(0, -2), targets.flatten())


class Transformer(nn.Module):
    """Encoder layers after `embedding`, which returns (examples, positions, width).

    With `causal`, every position has an output, which depends only on this position and the preceding positions, and
    the embedding and the output layer share weights. Otherwise, the output is computed from the mean over positions.
    With `checkpointing`, the backward pass recomputes each layer from the layer's input.
    """

    def __init__(
        self, embedding: nn.Module, shape: tuple[int, int, int, int], *, causal: bool, checkpointing: bool
    ) -> None:
        super().__init__()
        positions, outputs, width, depth = shape
        self.embedding, self.causal, self.checkpointing = embedding, causal, checkpointing
        self.position = nn.Parameter(0.02 * torch.randn(positions, width))
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        heads = max(1, width // 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(positions) if causal else None)
        if causal:
            self.head.weight = embedding.weight  # type: ignore[assignment]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs) + self.position
        for layer in self.layers:
            run = partial(layer, src_mask=self.mask, is_causal=self.causal)
            x = checkpoint(run, x, use_reentrant=False) if self.checkpointing else run(x)
        output: torch.Tensor = self.head(self.norm(x if self.causal else x.mean(1)))
        return output


class _Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, PATCH, PATCH)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches: torch.Tensor = self.convolution(images)
        return patches.flatten(2).transpose(1, 2)


@dataclass(frozen=True)
class Network:
    """Two functions: one builds a network, and the other builds a batch of any number of examples for it."""

    build: Callable[[], nn.Module]
    batch: Batches


def _images(side: int) -> Batches:
    return lambda size, device: (
        torch.randn(size, 3, side, side, device=device),
        torch.randint(CLASSES, (size,), device=device),
    )


def _text(tokens: int, vocabulary: int) -> Batches:
    def batch(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(vocabulary, (size, tokens + 1), device=device)
        return ids[:, :-1], ids[:, 1:]

    return batch


def _vision(name: str, smoke: bool) -> nn.Module:
    if smoke or importlib.util.find_spec("torchvision") is None:
        return resnet(18 if smoke else 50, channels=3, num_classes=CLASSES, width=8 if smoke else 64)
    network: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(num_classes=CLASSES)
    return network


def _gpt2(smoke: bool, checkpointing: bool) -> Network:
    tokens, vocabulary, width, _ = shape = (16, 128, 32, 2) if smoke else (1024, 50257, 768, 12)

    def build() -> nn.Module:
        return Transformer(nn.Embedding(vocabulary, width), shape, causal=True, checkpointing=checkpointing)

    return Network(build, _text(tokens, vocabulary))


def _vit_b(smoke: bool, checkpointing: bool) -> Network:
    side, width, depth = (32, 32, 2) if smoke else (SIDE, 768, 12)
    shape = ((side // PATCH) ** 2, CLASSES, width, depth)
    return Network(
        lambda: Transformer(_Patches(width), shape, causal=False, checkpointing=checkpointing), _images(side)
    )


def networks(smoke: bool) -> dict[str, Network]:
    """Return the networks by name, the most informative first; those with `+checkpointing` recompute activations.

    With `smoke`, the networks are small.
    """
    have = VISION if importlib.util.find_spec("torchvision") is not None and not smoke else VISION[:1]
    images = _images(32 if smoke else SIDE)
    found = {name: Network(partial(_vision, name, smoke), images) for name in have}
    for checkpointing in (False, True):
        suffix = "+checkpointing" if checkpointing else ""
        found |= {f"gpt2{suffix}": _gpt2(smoke, checkpointing), f"vit_b{suffix}": _vit_b(smoke, checkpointing)}
    return found
