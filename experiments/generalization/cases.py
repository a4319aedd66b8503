"""The cases that are trained (data set, network, large batch) and the modes (how much of them)."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        """For tables and files."""
        return f"{self.dataset}/{self.network}/{self.batch_size}"


@dataclass(frozen=True)
class Mode:
    """How much is run. The default rule was chosen on the `development` cases, which are never reported as its result.

    `shares`: hand-tuned learning-rate multipliers to try, as shares of B / 64, besides 1 and its root.
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
    real_ddp_seeds: int = 3

    def smoke(self) -> Mode:
        """The same steps in seconds: the first case, one short epoch, one seed. Its figures mean nothing."""
        return replace(
            self,
            cases=(replace(self.cases[0], batch_size=128, world_size=2),),
            seeds=1,
            epochs=1,
            num_train=256,
            learning_rates=self.learning_rates[:1],
            shares=self.shares[:1],
            real_ddp=None if self.real_ddp is None else replace(self.cases[0], batch_size=128, world_size=2),
            real_ddp_seeds=1,
        )


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
