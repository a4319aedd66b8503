"""Forwards the metrics that a script logs through accelerate: `Accelerator(log_with=[TulaTracker(run)])`.

The script keeps its own loop, which must iterate over `run.steps(loader)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tula_agent.callbacks import columns
from tula_agent.run import Run

if TYPE_CHECKING:

    class GeneralTracker:
        """Replaces the library's class during type checking, since that class has no annotations."""

        def __init__(self, _blank: bool = False) -> None: ...

else:
    from accelerate.tracking import GeneralTracker

__all__ = ["TulaTracker", "watch"]


class TulaTracker(GeneralTracker):
    """Forwards `accelerator.log(...)` to `run.log(...)`."""

    name = "tula"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    @property
    def tracker(self) -> Run:
        """Return the agent's run."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Ignore the configuration, since the job specification contains it."""

    def log(self, values: dict[str, Any], step: int | None = None, **others: Any) -> None:  # noqa: ARG002
        """Log metrics of the current step; ignore `step`, since `run.steps` counts the steps."""
        self.run.log(**columns(values))

    def finish(self) -> None:
        """End the run; `accelerator.end_training()` calls this."""
        self.run.finish()


def watch(run: Run, model: Any, optimizer: Any) -> None:
    """Call `run.watch` with objects from `accelerator.prepare`; watch the optimizer inside accelerate's wrapper."""
    run.watch(model, getattr(optimizer, "optimizer", optimizer))
