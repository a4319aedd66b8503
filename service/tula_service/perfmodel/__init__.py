"""The performance model: from measured step times and memory to a recommendation. Pure: no I/O, clock, log or wire.

Arrays and dataclasses in, arrays and dataclasses out; everything is deterministic. Errors are `ObservationError`
(a `ValueError`), one sentence each. What a use case does, in order:

    candidates = enumerate_candidates(SearchSpace.single(min_num_nodes=1, max_num_nodes=16, ranks_per_node=4, ...))
    observed = StepTimeObservations.at(configurations, step_time_s, relative_sd=..., exposed_comm_time_s=...)
    goal = Goal(objective, training, offers, limits)                     # what is to be chosen, and at which prices
    next_runs = plan(search, candidates, observed, goal=goal, budget=PlanBudget(max_runs=6))
    # next_runs.runs: (PlannedRun(configuration, purpose), ...), may go in parallel; next_runs.stop_reason: str | None

    model = fit_step_time(observed, collective=Collective.RING, prior=prior, candidates=candidates)
    predicted = model.predict(candidates)           # mean_s, low_s, high_s, extrapolated, terms, measured: columns
    memory = fit_memory(MemoryObservations(batches, peaks, capacity_bytes=..., static_bytes=...), prior=memory_prior)
    bound = memory.max_local_batch_size(capacity_bytes, safety_probability=0.95)

    result = recommend(candidates, model, goal, memory=memory)      # Recommendation: estimates, choice, curve
    result.choice.chosen, .runner_up, .knee, .least_time, .least_cost, .frontier, .excluded, .reason

`recommend` is `price` + `tradeoff_curve` + `find_knee` + `choose`; each may be called alone.

Before any run, pass no observations: `fit_step_time(None, prior=prior_from_hardware(facts, hardware))` has
`model.basis is Basis.PRIOR`; `scale_from_jobs(prior, earlier, device=...)` corrects its scale by how fast others ran,
and `prior_from_jobs(posteriors, scale=...)` makes it `Basis.TRANSFER`. Several instance types go in as
`Priors(believed={type: prior}, hardware={type: facts})`. With observations the basis is `Basis.PROFILED`.
`model.notes` are sentences about what cannot be said from the data (one cluster size only, ...).

While a run measures: `measured_precisely_enough(step_times, precision)` ends it early. Once training runs:
`watch_drift(state, step_times_s)` folds live steps into a `DriftState` (start from `DriftState.expecting(low, high)`);
`calibrate_intervals(...)` turns ledger pairs into the `interval_scale` that `fit_step_time` takes.
"""

from __future__ import annotations

from tula_service.perfmodel.choose.choice import Choice, Exclusion, Limits, choose
from tula_service.perfmodel.choose.knee import KneeFinding, find_knee
from tula_service.perfmodel.choose.pareto import pareto_frontier
from tula_service.perfmodel.choose.pricing import Estimate, Offer, Spot, Training, price, spot_slowdown
from tula_service.perfmodel.choose.recommend import Curve, Goal, Recommendation, recommend, tradeoff_curve
from tula_service.perfmodel.predict.drift import DriftState, watch_drift
from tula_service.perfmodel.predict.intervals import Interval, calibrate_intervals
from tula_service.perfmodel.predict.memory import MemoryModel, MemoryPredictions, MemoryPrior, fit_memory
from tula_service.perfmodel.predict.observations import (
    MemoryObservations,
    ObservationError,
    Points,
    StepTimeObservations,
)
from tula_service.perfmodel.predict.physical import PARAMETERS, Parameter
from tula_service.perfmodel.predict.priors import (
    Hardware,
    ModelFacts,
    Priors,
    StepTimePrior,
    generic_prior,
    prior_from_hardware,
)
from tula_service.perfmodel.predict.step_time import Form, StepTimeModel, StepTimePredictions, fit_step_time
from tula_service.perfmodel.predict.transfer import (
    EarlierScale,
    prior_from_jobs,
    prior_from_other_type,
    scale_from_jobs,
)
from tula_service.perfmodel.search.plan import Plan, PlanBudget, PlannedRun, plan
from tula_service.perfmodel.search.space import SearchSpace, enumerate_candidates, powers_of_two
from tula_service.perfmodel.search.stopping import StepTimeSummary, measured_precisely_enough, summarise_steps

__all__ = [
    "PARAMETERS",
    "Choice",
    "Curve",
    "DriftState",
    "EarlierScale",
    "Estimate",
    "Exclusion",
    "Form",
    "Goal",
    "Hardware",
    "Interval",
    "KneeFinding",
    "Limits",
    "MemoryModel",
    "MemoryObservations",
    "MemoryPredictions",
    "MemoryPrior",
    "ModelFacts",
    "ObservationError",
    "Offer",
    "Parameter",
    "Plan",
    "PlanBudget",
    "PlannedRun",
    "Points",
    "Priors",
    "Recommendation",
    "SearchSpace",
    "Spot",
    "StepTimeModel",
    "StepTimeObservations",
    "StepTimePredictions",
    "StepTimePrior",
    "StepTimeSummary",
    "Training",
    "calibrate_intervals",
    "choose",
    "enumerate_candidates",
    "find_knee",
    "fit_memory",
    "fit_step_time",
    "generic_prior",
    "measured_precisely_enough",
    "pareto_frontier",
    "plan",
    "powers_of_two",
    "price",
    "prior_from_hardware",
    "prior_from_jobs",
    "prior_from_other_type",
    "recommend",
    "scale_from_jobs",
    "spot_slowdown",
    "summarise_steps",
    "tradeoff_curve",
    "watch_drift",
]
