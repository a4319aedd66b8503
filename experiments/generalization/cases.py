"""Defines the cases (data set, network, large batch) and the modes (which cases, how many seeds and epochs)."""

from __future__ import annotations

from dataclasses import dataclass, replace

CHOSEN = "2026-11-26"
"""The date on which these cases, grids and methods were fixed, before any of them had been run in this form."""


@dataclass(frozen=True)
class Case:
    """One row of the report; `world_size` ranks share a batch, each with separate batch statistics, as under DDP.

    `num_train` is the number of training examples, if it differs from that of the mode.
    """

    dataset: str
    network: str
    batch_size: int
    world_size: int
    num_train: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the case in tables and files."""
        data = "" if self.num_train is None else f"@{self.num_train}"
        return f"{self.dataset}/{self.network}/{self.batch_size}{data}"

    @property
    def adam(self) -> bool:
        """Return True if the case is trained with AdamW, or False if it is trained with SGD."""
        return self.network == "transformer"

    @property
    def base_batch_size(self) -> int:
        """Return the batch size at which the base learning rate is chosen."""
        return 16 if self.adam else 64

    def at_base(self) -> Case:
        """Return a copy of the case with the small batch."""
        return replace(self, batch_size=self.base_batch_size, world_size=1)


@dataclass(frozen=True)
class Mode:
    """The extent of a campaign. Rules are developed on the `development` cases, which are never reported as results.

    `rates` and `adam_rates` are grids of base learning rates, which are extended while the best rate is at an edge.
    `tuning_seeds` is the number of seeds over which validation accuracy is averaged to choose a rate. `upper_seeds` is
    the number of seeds of the second table, whose base rate is the highest rate that is as good as the best. `shares`
    are the learning-rate multipliers to try by hand, as fractions of B / base. `num_eval` is the number of validation
    examples and also of test examples; if it is None, all examples of the data set are used. `profile_steps` is the
    number of steps of a profile.
    """

    name: str
    cases: tuple[Case, ...]
    seeds: int
    epochs: int
    num_train: int
    rates: tuple[float, ...]
    shares: tuple[float, ...]
    adam_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    lars_rates: tuple[float, ...] = (1.0, 2.0, 4.0)
    tuning_seeds: int = 3
    upper_seeds: int = 0
    ablations: bool = False
    device: str = "cpu"
    real_ddp: Case | None = None
    real_ddp_seeds: int = 3
    num_eval: int | None = None
    profile_steps: int = 128

    def smoke(self) -> Mode:
        """Return the mode of a smoke test, which trains a case with SGD and one with AdamW for one short epoch each."""
        adam = [case for case in self.cases if case.adam][:1]
        tiny = [
            replace(c, batch_size=2 * c.base_batch_size, world_size=2, num_train=4 * c.base_batch_size)
            for c in (self.cases[0], *adam)
        ]
        return replace(
            self,
            cases=tuple(tiny),
            seeds=2,
            epochs=1,
            num_train=256,
            rates=self.rates[:1],
            adam_rates=self.adam_rates[:1],
            lars_rates=self.lars_rates[:1],
            tuning_seeds=1,
            upper_seeds=min(1, self.upper_seeds),
            shares=self.shares[:1],
            real_ddp=None if self.real_ddp is None else tiny[0],
            real_ddp_seeds=1,
            num_eval=64,
            profile_steps=8,
        )


_RATES = (0.02, 0.05, 0.1, 0.2)
_QUICK = (
    Case("glyphs", "vgg", 512, 4),
    Case("glyphs", "resnet20", 512, 4, num_train=2048),
    Case("digits", "vgg", 256, 4),
    Case("digits", "residual", 256, 4),
    Case("digits", "depthwise", 256, 4),
    Case("stdlib", "transformer", 256, 8, num_train=1024),
)
_DDP = Case("digits", "vgg", 256, 4)

MODES = {
    "quick": Mode("quick", _QUICK, 5, 30, 6144, _RATES, (0.5, 1.0), upper_seeds=3, real_ddp=_DDP),
    "full": Mode(
        "full",
        (
            *_QUICK,
            Case("glyphs", "vgg", 256, 4),
            Case("glyphs", "vgg", 1024, 8),
            Case("glyphs", "residual", 512, 4),
            Case("glyphs", "residual", 1024, 8),
            Case("glyphs", "residual", 2048, 8),
            Case("glyphs", "resnet20", 1024, 8),
            Case("glyphs", "resnet20", 2048, 8),
            Case("glyphs", "depthwise", 1024, 8),
            Case("digits", "vgg", 128, 2),
            Case("digits", "residual", 512, 4),
            *(Case("stdlib", "transformer", 16 * ratio, min(ratio, 8), num_train=1024) for ratio in (2, 4, 8, 32)),
        ),
        10,
        30,
        6144,
        _RATES,
        (0.25, 0.5, 1.0, 2.0),
        upper_seeds=10,
        ablations=True,
        real_ddp=_DDP,
    ),
    "development": Mode(
        "development",
        (
            Case("shapes", "vgg", 512, 4),
            Case("shapes", "vgg", 1024, 8),
            Case("shapes", "residual", 1024, 8),
            Case("shapes", "residual", 2048, 8),
            Case("shapes", "depthwise", 1024, 8),
            # Added on 2026-11-24, after the default had been too fast on test cases with few steps and with AdamW.
            Case("shapes", "resnet20", 512, 4, num_train=2048),
            Case("numpy", "transformer", 64, 4, num_train=1024),
            Case("numpy", "transformer", 256, 8, num_train=1024),
        ),
        3,
        30,
        6144,
        _RATES,
        (0.25, 0.5, 1.0),
        ablations=True,
    ),
    # Chosen on 2026-11-27: one case that takes only minutes, at its usual rate. With 8,192 images, the small batch
    # reached 99 % before any large batch was trained, so there was no gap to close.
    "gpu": Mode("gpu", (Case("glyphs32", "resnet18", 512, 4),), 3, 30, 2048, (0.05,), (0.5, 1.0), device="cuda"),
}
