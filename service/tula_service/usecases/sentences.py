"""What is said about a choice in words, and the small figures that go with it."""

from __future__ import annotations

from collections import Counter

import tula_wire as wire
from tula_service.domain import Basis, Objective
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.pricing import Estimate
from tula_service.usecases import convert
from tula_service.usecases.fitting import Evidence
from tula_service.usecases.quality import Efficiency
from tula_wire import Configuration

__all__ = ["name_of", "savings", "warnings", "why"]

_RESTS_ON = {
    Basis.PRIOR: "Nothing of this job has been measured yet, so this is a guess from data sheets and earlier jobs.",
    Basis.TRANSFER: "Nothing of this job has been measured yet, so this rests on earlier jobs on nodes like these.",
    Basis.PROFILED: "",
}


def why(spec: wire.JobSpec, basis: Basis, choice: Choice, *, efficiency: Efficiency | None) -> str:
    """One or two sentences: why this one, what the runner-up lacks, what a limit excluded, what it rests on."""
    parts = []
    chosen = choice.chosen
    if chosen is None:
        parts.append(choice.reason)
    else:
        parts.append(f"{name_of(chosen.configuration)}: {choice.reason[0].lower()}{choice.reason[1:]}")
        if choice.runner_up is not None:
            parts.append(_against(spec, chosen, choice.runner_up))
        if choice.objective is Objective.KNEE and chosen is choice.knee and choice.within_limits_is_likely:
            parts.append(_knee(spec, chosen, choice))
    counts = Counter(found.limit for found in choice.excluded if found.estimate is not chosen)
    if counts and chosen is not None:
        said = ", ".join(f"{limit} {number}" for limit, number in sorted(counts.items()))
        parts.append(f"Excluded by limits: {said} of the candidates.")
    if choice.objective is Objective.TIME_TO_QUALITY:
        parts.append(
            "Time is to the quality of the smallest batch, at a gradient noise scale of "
            f"{efficiency.noise_scale:.3g} examples."
            if efficiency is not None
            else "The gradient noise scale is not known before training reports it, so this is the least time alone."
        )
    if _RESTS_ON[basis]:
        parts.append(_RESTS_ON[basis])
    return " ".join(parts)


def warnings(spec: wire.JobSpec, evidence: Evidence) -> list[str]:
    """What cannot be said from what was given and measured, with the remedy."""
    found = [
        f"Nothing bounds the local batch of {name}, so five doublings were tried: give "
        "cluster.memory_bytes_per_rank or batch.max_local_batch_size."
        for name in convert.unbounded_types(spec, evidence.memory_bound)
    ]
    if not convert.has_prices(spec):
        found.append("No price is known, so costs are ranked in node-hours: give cluster.price.")
    elif convert.payable(spec, evidence.memory) is not spec:
        found.append(
            "A price per GB-hour tells no cost before memory is known, so costs are ranked in node-hours and no budget "
            "is looked at: profile a run, or give model.activation_bytes_per_sample and model.parameters."
        )
    return found


def savings(recommendation: wire.Recommendation) -> tuple[float | None, float | None]:
    """Share of the training time saved against the smallest and the largest batch on as many nodes."""
    chosen = recommendation.chosen
    if chosen is None:
        return None, None
    mine = chosen.configuration
    peers = sorted(
        (
            c
            for c in recommendation.candidates
            if (c.configuration.num_nodes, c.configuration.instance_type, c.spot)
            == (mine.num_nodes, mine.instance_type, chosen.spot)
        ),
        key=lambda c: c.global_batch_size,
    )
    if not peers:
        return None, None
    time_s = chosen.total_time_s.value
    return 1.0 - time_s / peers[0].total_time_s.value, 1.0 - time_s / peers[-1].total_time_s.value


def name_of(c: Configuration) -> str:
    """A configuration in a few words."""
    nodes = f"{c.num_nodes} node{'s' if c.num_nodes != 1 else ''}"
    kind = "" if c.instance_type == "default" else f" of {c.instance_type}"
    return f"{nodes}{kind} at a global batch of {c.global_batch_size}"


def _knee(spec: wire.JobSpec, chosen: Estimate, choice: Choice) -> str:
    """What the knee is for, and what the larger batch that it forgoes would save or cost."""
    purpose = "The knee keeps the batch small, since larger ones tend to generalise worse"
    quick = choice.least_time
    ratio = 1.0
    if quick is not None:
        ratio = quick.configuration.global_batch_size / chosen.configuration.global_batch_size
    if quick is None or ratio <= 1.0:
        return f"{purpose}."
    remedy = "ask for time or cost where quality can bear it"
    if choice.runner_up is quick:
        return f"{purpose}: {remedy}."
    effect = f"save {1.0 - quick.time_s.mean / chosen.time_s.mean:.0%} of the time"
    if convert.has_prices(spec) and chosen.cost_usd.mean > 0:
        cost = quick.cost_usd.mean / chosen.cost_usd.mean - 1.0
        effect += f" and cost {cost:.0%} more" if cost > 0 else f" and {-cost:.0%} of the cost"
    return f"{purpose}: {name_of(quick.configuration)} would {effect}, at {ratio:.3g} times the batch; {remedy}."


def _against(spec: wire.JobSpec, chosen: Estimate, other: Estimate) -> str:
    time = other.time_s.mean / chosen.time_s.mean - 1.0
    parts = [f"{abs(time):.1%} {'slower' if time >= 0 else 'faster'}"]
    if convert.has_prices(spec) and chosen.cost_usd.mean > 0:
        cost = other.cost_usd.mean / chosen.cost_usd.mean - 1.0
        parts.append(f"{abs(cost):.1%} {'dearer' if cost >= 0 else 'cheaper'}")
    ratio = other.configuration.global_batch_size / chosen.configuration.global_batch_size
    at = "" if ratio == 1 else f", at {ratio:.3g} times the batch"
    return f"The runner-up, {name_of(other.configuration)}, is {' and '.join(parts)}{at}."
