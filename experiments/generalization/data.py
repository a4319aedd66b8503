"""Builds data sets without a download: scikit-learn's digits, glyphs from Pillow, textured shapes, and source code."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"  # the 47 classes of EMNIST Balanced
DATASETS = ("digits", "glyphs", "glyphs32", "shapes", "stdlib", "numpy")
WINDOW = 32  # number of bytes in the transformer's context


@dataclass(frozen=True)
class Split:
    """Standardised `images`, float32 (n, 1, side, side), with `labels`, int64 (n,); or bytes and the bytes that follow
    them, both int64 (n, WINDOW).
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def first(self, number: int | None) -> Split:
        """Return the first `number` examples, or all examples if `number` is None."""
        return Split(self.images[:number], self.labels[:number])

    def to(self, device: torch.device) -> Split:
        """Return a copy of the split on `device`."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class ImageSet:
    """Training, validation and test parts drawn from one distribution, always the same for a given name."""

    name: str
    num_classes: int
    side: int
    train: Split
    val: Split
    test: Split


@lru_cache(maxsize=8)
def load(name: str, *, num_train: int = 4096) -> ImageSet:
    """Build the data set `name` (one of DATASETS); the digits ignore `num_train`, since their number is fixed."""
    if name == "digits":
        return _digits()
    if name == "glyphs":
        return _split(name, *_glyphs(num_train + 1024 + 2048), num_train)
    if name == "shapes":
        return _split(name, *_shapes(num_train + 1024 + 2048, side=16), num_train)
    if name == "glyphs32":
        return _split(name, *_glyphs(num_train + 2048 + 4096, side=32), num_train)
    if name == "stdlib":
        return _sources(name, sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), num_train)
    if name == "numpy":
        return _sources(name, sorted(Path(np.__file__).parent.rglob("*.py")), num_train)
    raise ValueError(f"data set {name!r} is unknown: use one of {', '.join(DATASETS)}")


def _split(name: str, images: torch.Tensor, labels: torch.Tensor, num_train: int) -> ImageSet:
    rest = len(labels) - num_train
    cuts = (num_train, num_train + rest // 3)
    mean, std = images[: cuts[0]].mean(), images[: cuts[0]].std()
    images = ((images - mean) / std).contiguous(memory_format=torch.channels_last)
    parts = [Split(images[a:b], labels[a:b]) for a, b in ((0, cuts[0]), cuts, (cuts[1], len(labels)))]
    return ImageSet(name, int(labels.max()) + 1, int(images.shape[-1]), *parts)


def _sources(name: str, paths: Sequence[Path], num_train: int) -> ImageSet:
    """Cut windows out of source files; training, validation and test windows come from different modules."""
    parts = []
    for offset, (count, quarters) in enumerate(((num_train, (0, 3)), (512, (1,)), (1024, (2,)))):
        chosen = [path for index, path in enumerate(paths) if index % 4 in quarters]
        text = np.frombuffer(b"".join(path.read_bytes() for path in chosen), dtype=np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)
        starts = np.random.default_rng(offset).integers(0, len(windows), count)
        drawn = torch.from_numpy(windows[starts].astype(np.int64))
        parts.append(Split(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()))
    return ImageSet(name, 256, WINDOW, *parts)


def _digits() -> ImageSet:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    rng = np.random.default_rng(20)
    order = rng.permutation(len(bunch.target))
    # Without noise, every method would classify the digits correctly, and there would be no gap.
    noisy = bunch.images[order] + rng.normal(0.0, 4.0, bunch.images.shape)
    images = torch.as_tensor(noisy, dtype=torch.float32).unsqueeze(1)
    return _split("digits", images, torch.as_tensor(bunch.target[order], dtype=torch.int64), 1024)


def _glyphs(count: int, *, side: int = 16, canvas: int = 26) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw characters in Pillow's built-in font in several weights, with a random affine map, an occluder and noise."""
    rng = np.random.default_rng(7)
    weights = (0, 1, 2)
    sheet = np.zeros((len(GLYPHS), len(weights), canvas, canvas), dtype=np.float32)
    font = ImageFont.load_default(size=22)
    for i, character in enumerate(GLYPHS):
        for j, weight in enumerate(weights):
            picture = Image.new("L", (canvas, canvas), 0)
            ImageDraw.Draw(picture).text(
                (canvas // 2, canvas // 2), character, fill=255, font=font, anchor="mm", stroke_width=weight
            )
            sheet[i, j] = np.asarray(picture, dtype=np.float32) / 255.0
    labels = rng.integers(0, len(GLYPHS), count)
    masters = torch.from_numpy(sheet[labels, rng.integers(0, len(weights), count)]).unsqueeze(1)
    theta = torch.from_numpy(_random_affine(rng, count))
    grid = F.affine_grid(theta, [count, 1, side, side], align_corners=False)
    images = F.grid_sample(masters, grid, align_corners=False)
    rows, columns = rng.integers(0, side - 4, (2, count))
    where = np.arange(side)
    band = ((where >= rows[:, None]) & (where < rows[:, None] + 4))[:, :, None]
    band = band & ((where >= columns[:, None]) & (where < columns[:, None] + 4))[:, None, :]
    images[torch.from_numpy(band).unsqueeze(1)] = 0.5
    images += torch.from_numpy(rng.normal(0.0, 0.18, images.shape).astype(np.float32))
    return images, torch.as_tensor(labels, dtype=torch.int64)


def _random_affine(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Draw inverse maps (count, 2, 3): rotations of +-20 degrees, shears, scales of 0.75-1.25, shifts up to 1/8."""
    angle, shear = rng.uniform(-0.35, 0.35, count), rng.uniform(-0.3, 0.3, count)
    scale = rng.uniform(0.75, 1.25, (2, count))
    cos, sin = np.cos(angle), np.sin(angle)
    rows = np.stack([cos / scale[0], (shear - sin) / scale[0], sin / scale[1], cos / scale[1]], axis=1)
    shift = rng.uniform(-0.25, 0.25, (count, 2, 1))
    return np.concatenate([rows.reshape(count, 2, 2), shift], axis=2).astype(np.float32)


def _shapes(count: int, *, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one of five outlines with one of five textures on a textured background; each pair is one of 25 classes."""
    rng = np.random.default_rng(11)
    outline, texture = rng.integers(0, 5, (2, count))
    axis = np.linspace(-1.0, 1.0, side)
    y0, x0 = np.meshgrid(axis, axis, indexing="ij")
    angle, size = rng.uniform(0, 2 * np.pi, (count, 1, 1)), rng.uniform(0.55, 0.85, (count, 1, 1))
    shift = rng.uniform(-0.2, 0.2, (2, count, 1, 1))
    x, y = x0 - shift[0], y0 - shift[1]
    u = (np.cos(angle) * x + np.sin(angle) * y) / size
    v = (-np.sin(angle) * x + np.cos(angle) * y) / size
    radius = np.hypot(u, v)
    inside = np.stack(
        [
            1 - radius,
            0.8 - np.maximum(abs(u), abs(v)),
            0.45 - np.maximum(v, 0.866 * abs(u) - 0.5 * v),
            np.maximum(0.3 - abs(u), 0.3 - abs(v)) * (radius < 1),
            0.3 - abs(radius - 0.65),
        ]
    )[outline, np.arange(count)]
    mask = 1 / (1 + np.exp(-inside * side * 0.8))
    frequency = rng.uniform(0.30, 0.42, (count, 1, 1)) * side
    phase = rng.uniform(0, 2 * np.pi, (2, count, 1, 1))
    waves = np.sin(frequency * x0 + phase[0]), np.sin(frequency * y0 + phase[1])
    diagonal = np.sin(frequency * (x0 + y0) * 0.7 + phase[0])
    fill = np.stack([waves[0], waves[1], diagonal, waves[0] * waves[1] * 1.4, np.ones_like(waves[0]) * 0.6])
    ground = 0.5 * np.sin(frequency * (x0 - y0) * 0.5 + phase[1])
    images = mask * fill[texture, np.arange(count)] + (1 - mask) * ground
    images *= rng.uniform(0.6, 1.4, (count, 1, 1))
    images += rng.normal(0.0, 0.25, images.shape)
    labels = torch.as_tensor(outline * 5 + texture, dtype=torch.int64)
    return torch.as_tensor(images, dtype=torch.float32).unsqueeze(1), labels
