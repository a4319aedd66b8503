"""What is remembered of a training run between two batches of samples; stored as JSON on the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tula_service.perfmodel.change_detector import DriftState
from tula_service.usecases.advice import Progress

__all__ = ["Alarm", "Watched", "read", "told", "written"]


@dataclass(frozen=True)
class Alarm:
    """A change of speed that was noticed and not yet explained: what the fit and the advice need of that moment.

    `kind` is what the detector said, after so many steps; `compute_s` is known where the agent reports it.
    `examples_left` is None of a training that did not tell what it has behind it. `explained`: only the advice is due.
    """

    kind: str
    step: int
    after_steps: int
    from_start: bool
    level_s: float
    compute_s: float | None
    examples_left: float | None
    explained: bool = False


@dataclass(frozen=True)
class Watched:
    """A run's watch: the detector, and what was predicted of the run as if nothing had drifted (`low_s`, `high_s`).

    `ratios`, `sentence` and `level_s` are what a drift did, once explained. `spent_s` and `spent_usd` are what the runs
    took that this one goes on from; `elapsed_s` is its own time. Without a prediction there is no detector, and only
    limits are minded.
    """

    detector: DriftState | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    restart_s: float | None = None
    checked_at: int = 0
    said: list[str] = field(default_factory=list)
    alarm: Alarm | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    level_s: float | None = None
    sentence: str | None = None
    peak_bytes: float | None = None
    elapsed_s: float = 0.0
    spent_s: float = 0.0
    spent_usd: float = 0.0

    def progress(self, step: int, examples_left: float, step_time_s: float) -> Progress:
        """Where the training stands at `step`, with so much left at so many seconds a step."""
        return Progress(
            step=step,
            examples_left=examples_left,
            step_time_s=step_time_s,
            elapsed_s=self.elapsed_s,
            spent_s=self.spent_s,
            spent_usd=self.spent_usd,
            restart_s=self.restart_s or 0.0,
            peak_bytes=self.peak_bytes,
        )


def told(watched: Watched, kind: str, *, step: int, after_steps: int | None, level_s: float) -> dict[str, Any]:
    """What every event `drift` has."""
    return {
        "alarm": kind,
        "step": step,
        "after_steps": after_steps,
        "step_time_s": level_s,
        "expected_low_s": watched.low_s,
        "expected_high_s": watched.high_s,
    }


def read(state: dict[str, Any]) -> Watched:
    """The inverse of `written`."""
    detector, alarm = state.get("detector"), state.get("alarm")
    return Watched(
        **{
            **state,
            "detector": None if detector is None else DriftState(**detector),
            "alarm": None if alarm is None else Alarm(**alarm),
        }
    )


def written(watched: Watched) -> dict[str, Any]:
    """As the run keeps it."""
    return asdict(watched)
