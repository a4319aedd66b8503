"""What is trained: a case is a data set, a network and a large batch; a mode is how much of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BASE_BATCH_SIZE", "MODES", "Case", "Mode"]

BASE_BATCH_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One row of the report: `world_size` ranks share a batch, each with its own batch statistics, as under DDP."""

    dataset: str
    network: str
    batch_size: int
    world_size: int

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.dataset}/{self.network}/{self.batch_size}"


@dataclass(frozen=True)
class Mode:
    """How much is run. `development` cases served to choose the default rule and are never reported as its result.

    `shares`: hand-tuned learning-rate multipliers to try, as shares of B / 64, beside 1 and its root.
    """

    name: str
    cases: tuple[Case, ...]
    seeds: int
    epochs: int
    num_train: int
    learning_rates: tuple[float, ...]
    shares: tuple[float, ...]
    ablations: bool = False
    device: str = "cpu"
    real_ddp: Case | None = None


_RATES = (0.02, 0.05, 0.1, 0.2)
_QUICK = (
    Case("glyphs", "vgg", 512, 4),
    Case("glyphs", "residual", 1024, 8),
    Case("digits", "vgg", 256, 4),
    Case("digits", "residual", 256, 4),
    Case("digits", "depthwise", 256, 4),
)
_DDP = Case("digits", "vgg", 256, 4)

MODES = {
    "quick": Mode("quick", _QUICK, 5, 30, 6144, _RATES, (0.5, 1.0), real_ddp=_DDP),
    "full": Mode(
        "full",
        (
            *_QUICK,
            Case("glyphs", "vgg", 256, 4),
            Case("glyphs", "vgg", 1024, 8),
            Case("glyphs", "residual", 512, 4),
            Case("glyphs", "residual", 2048, 8),
            Case("glyphs", "depthwise", 512, 4),
            Case("glyphs", "depthwise", 1024, 8),
            Case("digits", "vgg", 128, 2),
            Case("digits", "residual", 512, 4),
        ),
        10,
        30,
        6144,
        (0.01, *_RATES),
        (0.25, 0.5, 1.0, 2.0),
        ablations=True,
        real_ddp=_DDP,
    ),
    "development": Mode(
        "development",
        (
            Case("shapes", "vgg", 512, 4),
            Case("shapes", "vgg", 1024, 8),
            Case("shapes", "residual", 1024, 8),
            Case("shapes", "depthwise", 1024, 8),
        ),
        3,
        30,
        6144,
        _RATES,
        (0.25, 0.5, 1.0),
        ablations=True,
    ),
    "gpu": Mode(
        "gpu",
        (
            Case("shapes32", "resnet18", 512, 4),
            Case("shapes32", "resnet18", 2048, 8),
            Case("shapes32", "resnet50", 1024, 8),
        ),
        5,
        30,
        32768,
        (0.02, 0.05, 0.1),
        (0.5, 1.0),
        ablations=True,
        device="cuda",
    ),
}
