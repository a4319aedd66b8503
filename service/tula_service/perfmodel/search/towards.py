"""Runs towards a choice: measure it, then whatever might beat it, until nothing is likely to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tula_service.domain import Configuration, Objective
from tula_service.perfmodel.choose.choice import Choice
from tula_service.perfmodel.choose.recommend import Goal, Recommendation, recommend
from tula_service.perfmodel.predict.memory import MemoryModel
from tula_service.perfmodel.predict.residual import SURPRISING
from tula_service.perfmodel.predict.step_time import StepTimeModel
from tula_service.perfmodel.search.informative import informative_runs, weighing
from tula_service.perfmodel.search.promise import Doubt, hopes
from tula_service.perfmodel.search.situation import Plan, PlannedRun, Situation

__all__ = ["towards_choice"]

_WORTH_A_RUN = 0.005
_CHANCE_WORTH_A_RUN = 0.02
_KNOWN_WELL = 0.03
_CHEAP = 0.2
_MEDIAN_OF_NORMAL = 0.67


def towards_choice(
    now: Situation,
    model: StepTimeModel,
    goal: Goal,
    memory: Mapping[str, MemoryModel] | None,
    *,
    design: int,
    cheap: int,
) -> Plan:
    """The next run towards the choice, or why there is none.

    The design may be a run short of `design`. That run comes first where the would-be choice was not measured: then the
    choice is open, and the run tells most about what may be chosen. Where it was, the run waits until nothing is hoped
    for any more. Then, while predictions are expected to err by more than 3 %, it and up to `cheap` further runs are
    made that tell most about all candidates; the further ones only where each costs at most a fifth of what was spent.
    A knee makes neither: it rests on the whole curve, and its four runs were made for that.
    """
    result = recommend(now.candidates, model, goal, memory=memory)
    choice = result.choice
    rows = {c: row for row, c in enumerate(now.candidates)}
    chosen = choice.chosen
    unfinished = weighing(goal) is not None and now.done < design
    if unfinished and now.runs_left > 1 and not (chosen is not None and chosen.measured):
        return Plan(informative_runs(now, 1, goal, thrifty=True), None)
    if chosen is not None and not chosen.measured and rows[chosen.configuration] in now.affordable:
        why = "Verification: it would be recommended, so it is measured itself."
        return Plan((PlannedRun(chosen.configuration, why),), None)
    found = hopes(choice, result.estimates, goal, doubts=_doubts(now, model, result, goal))
    affordable = [(hope, c) for hope, c in found if rows[c] in now.affordable]
    if affordable:
        # Among equals the smaller cluster: its run costs less.
        hope, best = max(affordable, key=lambda pair: (round(pair[0], 3), -pair[1].world_size, pair[1]))
        if not choice.within_limits_is_likely and hope > _CHANCE_WORTH_A_RUN:
            why = f"Contender: it might keep the limits, with a chance of {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
        if choice.within_limits_is_likely and hope > _WORTH_A_RUN:
            why = f"Contender: it might beat the choice; expected gain {100 * hope:.1f} %."
            return Plan((PlannedRun(best, why),), None)
    if weighing(goal) is not None and _expected_error(now, model) > _KNOWN_WELL:
        worth_it = now if unfinished else replace(now, affordable=_cheap(now, design + cheap))
        if worth_it.affordable:
            return Plan(informative_runs(worth_it, 1, None, thrifty=True), None)
    return Plan((), _reason(choice))


def _cheap(now: Situation, most: int) -> frozenset[int]:
    """The affordable rows whose run adds little to what was spent; none once `most` runs were made."""
    costs = now.step_gpu_seconds
    if costs is None or now.done >= most:
        return frozenset()
    spent = sum(float(costs[row]) for row, c in enumerate(now.candidates) if c in now.measured)
    return frozenset(row for row in now.affordable if costs[row] <= _CHEAP * spent)


def _doubts(now: Situation, model: StepTimeModel, result: Recommendation, goal: Goal) -> Mapping[Configuration, Doubt]:
    """What each candidate would be were this a job whose clusters differ more than any form can know."""
    if goal.objective is Objective.KNEE or not result.choice.within_limits_is_likely:
        return {}
    usual, surprising = (m.predict(now.candidates) for m in (model, now.fit((SURPRISING,))))
    shifts = np.log(surprising.mean_s / usual.mean_s)
    return {
        c: Doubt(float(shift), float(sd))
        for c, shift, sd in zip(now.candidates, shifts, surprising.log_sd, strict=True)
    }


def _expected_error(now: Situation, model: StepTimeModel) -> float:
    """Median over what was not measured of the median relative error that the model owns up to; 0 if all was."""
    predicted = model.predict(now.candidates)
    open_sd = predicted.log_sd[~predicted.measured]
    return _MEDIAN_OF_NORMAL * float(np.median(open_sd)) if open_sd.size else 0.0


def _reason(choice: Choice) -> str:
    if choice.chosen is None:
        return f"No further run helps: {choice.reason}"
    if not choice.chosen.measured:
        return "The rest of the budget pays for no run of the choice: it stays a prediction."
    if choice.objective is Objective.KNEE and choice.knee is None:
        return f"The choice is stable: it has been measured. {choice.knee_finding.reason.capitalize()}"
    return "The choice is stable: it has been measured, and no further run is likely to better it."
