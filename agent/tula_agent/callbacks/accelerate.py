"""`Accelerator(log_with=[TulaTracker(run)])`: what accelerate logs becomes telemetry; the loop is the script's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tula_agent.callbacks._names import columns
from tula_agent.run import Run

if TYPE_CHECKING:

    class GeneralTracker:
        """Stands for the library's own."""

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
        """The agent's run."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing to keep: the job's specification has it."""

    def log(self, values: dict[str, Any], step: int | None = None, **others: Any) -> None:  # noqa: ARG002
        """Numbers of the step under way; accelerate's own count is not needed, since `run.steps` counts too."""
        self.run.log(**columns(values))

    def finish(self) -> None:
        """`accelerator.end_training()` was called."""
        self.run.finish()


def watch(run: Run, model: Any, optimizer: Any) -> None:
    """`run.watch` for what `accelerator.prepare` returned: hooks go on the optimizer inside accelerate's wrapper."""
    run.watch(model, getattr(optimizer, "optimizer", optimizer))
