"""Advice to a running training, each time with its arithmetic: start again elsewhere, or mind a limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import tula_wire as wire
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.explanation import name_of
from tula_service.domain import Objective
from tula_service.store import JobRecord, RunRecord, Transaction
from tula_service.usecases.job_data import load
from tula_service.usecases.remaining import usd_per_s

__all__ = ["Progress", "mind_limits", "reconfigure"]

_LEAST_SAVING = 0.02


@dataclass(frozen=True)
class Progress:
    """Where a training stands at `step` of its run, whose steps take `step_time_s`.

    `elapsed_s` is this run's time; `spent_s` and `spent_usd` are those of the runs that it goes on from. `peak_bytes`
    is a rank's expected memory, where it is known. `restart_s` is what starting again would take.
    """

    step: int
    examples_left: float
    step_time_s: float
    elapsed_s: float
    spent_s: float
    spent_usd: float
    restart_s: float
    peak_bytes: float | None


def reconfigure(tx: Transaction, job: JobRecord, run: RunRecord, at: Progress) -> dict[str, Any] | None:
    """The advice to take another configuration, when what it saves over the rest exceeds what the restart costs, or to
    stay; None where there is nothing to choose between. Only reads."""
    found = analyse(load(tx, job))
    if not isinstance(found, Answer):
        return None
    chosen = found.choice.chosen
    if chosen is None or chosen.configuration == run.configuration:
        return None
    stay_s = at.examples_left / run.configuration.global_batch_size * at.step_time_s
    move_s = at.examples_left / chosen.configuration.global_batch_size * chosen.step_time_s.mean
    stay, move, unit = stay_s, move_s + at.restart_s, "s"
    if Objective(job.objective) is Objective.COST:
        here = usd_per_s(found.spec, run.configuration, at.peak_bytes)
        there = usd_per_s(found.spec, chosen.configuration, chosen.peak_bytes.mean if chosen.peak_bytes else None)
        unit = "USD"
        if here is None or there is None:  # as in the choice, while nothing is known of the memory that is paid for
            here, there, unit = run.configuration.num_nodes / 3600, chosen.configuration.num_nodes / 3600, "node-hours"
        stay, move = stay * here, move * there
    saving = stay - move
    pays = stay > 0 and saving > _LEAST_SAVING * stay
    return {
        "kind": "reconfigure" if pays else "stay",
        "step": at.step,
        "from": asdict(run.configuration),
        "to": asdict(chosen.configuration),
        "remaining_examples": at.examples_left,
        "step_time_s": at.step_time_s,
        "predicted_step_time_s": chosen.step_time_s.mean,
        "stay_s": stay_s,
        "move_s": move_s,
        "restart_s": at.restart_s,
        "saving": saving,
        "unit": unit,
        "sentence": (
            f"{'Restart with' if pays else 'Stay; not worth moving to'} {name_of(chosen.configuration)}: "
            f"the rest takes {stay:.4g} {unit} as it is and {move:.4g} {unit} there, "
            f"{at.restart_s:.3g} s of restart included."
        ),
    }


def mind_limits(tx: Transaction, spec: wire.JobSpec, run: RunRecord, at: Progress, *, said: list[str]) -> list[str]:
    """Say that deadline or budget will not hold at the present speed, unless it is in `said`; those said by now."""
    steps_left = at.examples_left / run.configuration.global_batch_size
    here_s = at.elapsed_s + steps_left * at.step_time_s
    rate = None if spec.limits.budget_usd is None else usd_per_s(spec, run.configuration, at.peak_bytes)
    earlier = f", {at.spent_s:.4g} s of earlier starts included" if at.spent_s else ""
    now = list(said)
    for name, value, limit, unit in (
        ("deadline", at.spent_s + here_s, spec.limits.deadline_s, "s"),
        ("budget", None if rate is None else at.spent_usd + rate * here_s, spec.limits.budget_usd, "USD"),
    ):
        if limit is None or value is None or value <= limit or name in said:
            continue
        now.append(name)
        sentence = (
            f"At {at.step_time_s:.3g} s a step, with {steps_left:.0f} steps left, training ends at {value:.4g} {unit}"
            f"{earlier}, beyond the {name} of {limit:.4g} {unit}."
        )
        data = {
            "kind": name,
            "step": at.step,
            "steps_left": steps_left,
            "projected": value,
            "limit": limit,
            "unit": unit,
            "sentence": sentence,
        }
        tx.events.append(run.job_id, "advice", run_id=run.id, data=data)
    return now
