"""Which of the two ways of telling communication from compute a run uses, and its upkeep on the training thread."""

from __future__ import annotations

from typing import Any

from tula_agent.measure.no_sync import Alternation
from tula_agent.measure.step_timer import StepTiming
from tula_agent.measure.sync_split import DdpClock, Reading, sample_rate
from tula_agent.ship.reporter import Reporter
from tula_agent.torch_private import ddp_models

__all__ = ["Splitting"]


class Splitting:
    """DDP's own clock where it has one, else, in a profiling run only, steps without synchronisation; else nothing."""

    def __init__(
        self, models: list[Any], reporter: Reporter, *, profiling: bool, alternate: bool, grad_accum_steps: int
    ) -> None:
        self._reporter = reporter
        self._recent: dict[int, StepTiming] = {}
        self._alternation: Alternation | None = None
        models = ddp_models(models)
        clock = DdpClock(models, sample_rate(models, profiling))
        self._clock = clock if models and clock.usable and not (profiling and alternate) else None
        if self._clock is not None:
            reporter.splits_expected = True
        elif models and profiling and grad_accum_steps == 1:
            self._alternation = Alternation(models)
            reporter.alternates = True

    def boundary(self, under_way: int, ended: StepTiming | None) -> None:
        """A micro-step of step `under_way` is over; `ended` is that step when it was its last."""
        if self._clock is None:
            return
        if ended is not None:
            self._recent[ended.step] = ended
            self._recent.pop(ended.step - 4, None)
        news = self._clock.poll(under_way)
        timing = self._recent.get(news[0]) if news is not None else None
        if news is not None and timing is not None:
            _, communication, exposed = news
            self._reporter.readings.append(
                Reading(timing.step, timing.step_time_s, timing.input_time_s, communication, exposed)
            )

    def synchronised(self, timing: StepTiming) -> bool:
        """A step after the warm-up has ended: True when its gradients were synchronised. Sets the next one up."""
        if self._alternation is None:
            return True
        lap = self._alternation.lap_over(timing.step, timing.step_time_s - timing.input_time_s)
        self._reporter.laps.append(lap)
        return lap.synchronised

    def end(self) -> None:
        """Synchronise from now on."""
        if self._alternation is not None:
            self._alternation.end()
