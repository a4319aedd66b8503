"""Renders an answer as wire models, with sentences that explain the choice and its uncertainty."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

from scipy import special

import tula_wire as wire
from tula_service.analysis import hardware, job_data
from tula_service.analysis.answer import MODEL_VERSION, Answer, Infeasible
from tula_service.analysis.effects import best_with, find_effects
from tula_service.analysis.evidence import Evidence
from tula_service.analysis.scaling import LearningRate, StatisticalEfficiency
from tula_service.perfmodel.choice import Choice, Exclusion
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import OBJECTIVES
from tula_service.perfmodel.points import PointKey
from tula_service.perfmodel.pricing import JOULES_PER_KWH, Estimate, Limits, usd_per_hour_saved
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_wire import Configuration
from tula_wire.configurations import Variant
from tula_wire.format import cluster_name, duration, money, multiple, option, percent

_EQUAL_LENGTHS = 0.02  # share of the mean; sequences whose lengths differ by less are treated as equally long
_NOTABLE_INPUT = 0.1  # share of the step time
_CHOSEN = ("chosen", "runner_up", "least_time", "least_cost", "balanced")  # fields of a choice and of its wire model
_LIMITS = {"deadline_s": "deadline", "budget_usd": "budget", "max_global_batch_size": "largest global batch"}
_CONTRADICTION = 1.25
_IMPLAUSIBLE = 2.0  # no pair of configurations reaches this ratio in 69 of 72 public grids
_RESTS_ON = {
    "prior": "No run of this job has been measured yet, so this answer is a guess from data sheets and earlier jobs.",
    "transfer": "No run of this job has been measured yet, so this answer is based on earlier jobs on similar nodes.",
    "probed": "No run on several nodes has been measured yet, so the communication time is based on a probe.",
    "profiled": "",
}


def recommendation_fields(answer: Answer, cross_validated_error: float | None) -> dict[str, object]:
    """Return all fields of `wire.Recommendation` for an answer, except for `id`, `job_id` and `created_at`.

    The recommendation lists only candidates with the base options or with launched options; `options` has the expected
    effects of all options. `cross_validated_error` must be None or computed from the runs and the model of this answer.
    """
    choice, evidence, base = answer.choice, answer.evidence, answer.spec.base_options
    knee, chosen = choice.knee.estimate, choice.chosen
    shown = {base, *(c.options for c, _ in evidence.rows)}
    ruled_out = tuple(c for c in evidence.ruled_out if c.options in shown)
    estimates = [estimate for estimate in answer.estimates if estimate.configuration.options in shown]
    candidates = render_candidates(answer, (*estimates, *answer.estimate(ruled_out)))
    by_key = {(candidate.configuration, candidate.spot): candidate for candidate in candidates}

    def found(estimate: Estimate | None) -> wire.Candidate | None:
        return None if estimate is None else by_key.get(estimate.key)

    return {
        "basis": answer.model.basis,
        "objective": answer.objective,
        **{name: found(getattr(choice, name)) for name in _CHOSEN},
        "knee": wire.Knee(
            found=knee is not None,
            configuration=None if knee is None else knee.configuration,
            global_batch_size=None if knee is None else knee.configuration.global_batch_size,
            reason=choice.knee.reason,
        ),
        "with_base_options": found(best_with(answer, base)) if base else None,
        "options": find_effects(answer),
        "quality": assess_quality(answer),
        "why": why(answer),
        "scaling_rule": None if chosen is None else suggest_learning_rate(answer, chosen.configuration).rule,
        "candidates": candidates,
        "frontier": [estimate.configuration for estimate in choice.frontier],
        "menu": _menu(answer),
        "max_local_batch_size": {
            variant.instance_type: batch
            for variant, batch in evidence.memory.max_local_batch_size.items()
            if variant.options == (base if chosen is None else chosen.configuration.options)
        },
        "max_sensible_batch_size": _max_sensible_batch_size(answer),
        "model": model_report(answer, cross_validated_error),
    }


def infeasible_fields(analysis: Infeasible) -> dict[str, object]:
    """Return the fields of `wire.Recommendation` for a job that has no candidates."""
    reason = analysis.reason
    return {
        "basis": "prior",
        "objective": analysis.objective,
        "knee": wire.Knee(found=False, reason="no knee: there are no candidates."),
        "why": f"Nothing can be recommended. {reason[0].upper()}{reason[1:]}",
        "candidates": [],
        "frontier": [],
        "model": wire.ModelReport(form="none", version=MODEL_VERSION, num_runs=0, num_samples=0, warnings=[reason]),
    }


def _menu(answer: Answer) -> list[wire.MenuPoint]:
    """Return the points of the menu, each with its additional cost per hour saved over the next slower point."""
    menu, priced = answer.choice.menu, answer.choice.goal.priced
    chosen = answer.choice.chosen
    return [
        wire.MenuPoint(
            configuration=point.configuration,
            spot=point.spot,
            global_batch_size=point.configuration.global_batch_size,
            total_time_s=to_wire_estimate(point.time_s),
            cost_usd=to_wire_estimate(point.cost_usd) if priced else None,
            usd_per_hour_saved=usd_per_hour_saved(point, after) if priced and after is not None else None,
            **_energy(answer, point),
            recommended=chosen is not None and point.key == chosen.key,
        )
        for point, after in zip_longest(menu, menu[1:])
    ]


def render_candidates(answer: Answer, estimates: Sequence[Estimate]) -> list[wire.Candidate]:
    """Return the estimates as wire candidates with all predictions, in the given order.

    Candidates that would practically never finish because of spot interruptions are omitted, since JSON cannot
    represent infinity.
    """
    frontier = {estimate.key for estimate in answer.choice.frontier}
    broken, limits = reversed(answer.choice.excluded), answer.choice.goal.limits  # the decisive limits are last
    breaches = {exclusion.estimate.key: breach(exclusion, limits) for exclusion in broken}
    finite = [estimate for estimate in estimates if math.isfinite(estimate.time_s.mean)]
    return [_candidate(answer, estimate, frontier, breaches) for estimate in finite]


def model_report(answer: Answer, cross_validated_error: float | None = None) -> wire.ModelReport:
    """Return a report on the model that makes the predictions, including its data and warnings."""
    evidence, model = answer.evidence, answer.model
    memory = [note for variant in sorted(evidence.memory.models) for note in evidence.memory.models[variant].notes]
    warnings = [*_warnings(answer), *_unequal_lengths(answer.data.seen_tokens)]
    warnings += [*_waits_for_data(answer), *_memory_of_chosen(answer)]
    warnings += _large_convolutions(answer.data.spec, evidence)
    priced = (answer.data.spec.usd_per_kwh, answer.data.spec.gco2_per_kwh) != (None, None)
    if priced and evidence.rows and not answer.choice.goal.power_w:
        warnings.append("Energy is not predicted because no run has reported it; NVML measures it on NVIDIA devices.")
    if model.basis == "prior":
        warnings += hardware.describe_guesses(answer.data.spec)
    return wire.ModelReport(
        form=model.form,
        version=MODEL_VERSION,
        num_runs=len(evidence.rows),
        num_samples=evidence.num_samples,
        cross_validated_error=cross_validated_error,
        warnings=list(dict.fromkeys((*warnings, *find_gaps(model), *memory, *evidence.warnings))),
    )


def assess_quality(answer: Answer) -> wire.Quality | None:
    """Return whether the chosen batch is expected to preserve the base batch's accuracy, or None if none was chosen."""
    choice = answer.choice
    guard = choice.goal.guard
    if choice.chosen is None or guard is None:
        return None
    batch = choice.chosen.configuration.global_batch_size
    larger = [e for e in choice.estimates if e.configuration.global_batch_size > batch]
    rate = suggest_learning_rate(answer, choice.chosen.configuration)
    refused = bool(larger) and not any(guard.allows(e.configuration.global_batch_size) for e in larger)
    return wire.Quality(
        kept=guard.allows(batch),
        steps=guard.steps(batch),
        base_batch_size=guard.base_batch_size,
        base_steps=guard.steps(guard.base_batch_size),
        noise_scale=guard.noise_scale,
        sentence=guard.sentence(
            batch,
            refused_larger=refused,
            learning_rate_factor=rate.factor,
            divided=rate.divided,
        ),
    )


def why(answer: Answer) -> str:
    """Return sentences that explain the choice, the runner-up, the excluded candidates, and the answer's basis."""
    choice, objective = answer.choice, OBJECTIVES[answer.objective]
    parts = []
    chosen = choice.chosen
    if chosen is None:
        parts.append(explain_choice(choice))
    else:
        on_demand = " on demand" if choice.goal.spot_offers and not chosen.spot else ""
        parts.append(f"{_named(chosen)}{on_demand}: {explain_choice(choice)}")
        if choice.runner_up is not None:
            difference = _difference(choice, chosen, choice.runner_up)
            parts.append(f"The runner-up, {_named(choice.runner_up)}, {difference}.")
        if objective.is_compromise and choice.within_limits_is_likely:
            parts.append(_smaller_batch(choice, chosen))
    counts = Counter(exclusion.limit for exclusion in choice.excluded if exclusion.estimate is not chosen)
    if counts and chosen is not None:
        excluded = ", ".join(f"{limit} {number}" for limit, number in sorted(counts.items()))
        parts.append(f"Candidates excluded by limits: {excluded}.")
    parts += answer.evidence.crashed
    nearest = nearest_misses(choice)
    parts += [
        f"Nearest miss of the {name}: {_named(nearest[limit].estimate)}; {breach(nearest[limit], choice.goal.limits)}"
        for limit, name in _LIMITS.items()
        if limit in nearest
    ]
    if objective.needs_efficiency:
        parts.append(
            f"The predicted time is the time needed to match the quality of a batch of {answer.base_batch_size}, at a "
            f"gradient noise scale of {answer.efficiency.noise_scale:,.0f} examples"
            + (
                ", as measured by profiling runs; it grows during training."
                if answer.data.trained_noise_scale is None
                else "."
            )
            if answer.efficiency is not None
            else "No run has reported the gradient noise scale (scripts that use `TulaOptimizer` report it), so only "
            "the time was minimised."
        )
    if chosen is not None:
        parts.append(suggest_learning_rate(answer, chosen.configuration).advice)
    return " ".join(filter(None, (*parts, _RESTS_ON[answer.model.basis])))


def explain_choice(choice: Choice) -> str:
    """Return the reason for the choice or, if nothing was chosen, sentences with limits that would admit a candidate.

    The reason is a clause that completes a sentence.
    """
    chosen, least = choice.chosen, _least(choice)
    if chosen is None:
        limits = ", ".join(sorted({exclusion.limit for exclusion in choice.excluded}))
        return (
            f"No candidate meets the limits ({limits}){least and ': '}{least}. Relax a limit or widen the range of "
            "nodes."
        )
    if not choice.within_limits_is_likely:
        # The errors of a configuration's time and cost are equal, so the tighter limit determines the probability.
        chance = special.ndtr(choice.goal.limits.margin(chosen))
        return (
            f"it is the most likely to meet the limits, with a probability of {chance * 100:.0f} %; "
            f"no candidate meets them at the upper end of its interval: {least}."
        )
    return choice.merit + (f" Without deadline and budget, {least}." if choice.best_is_excluded else "")


def _least(choice: Choice) -> str:
    """Return a text that states the candidates' shortest time and lowest cost, for comparison with the limits.

    The text includes the upper end of each interval, which decides whether a candidate meets a limit. Candidates that
    are excluded by the limit on the global batch or by interruptions are ignored. If no candidates remain, the text is
    empty.
    """
    barred = choice.barred
    near = [e for e in choice.estimates if e.configuration not in choice.ineligible and e.key not in barred]
    if not near:
        return ""
    time_s = min((estimate.time_s for estimate in near), key=lambda value: value.high)
    high = duration(time_s.high)
    if time_s.high >= 60.0:  # also in seconds, since the text is rounded and a deadline is specified in seconds
        high += f" ({math.ceil(time_s.high):,} s)"
    least = f"the fastest takes {duration(time_s.mean)}, or {high} at the upper end of its interval"
    if any(exclusion.limit == "budget_usd" for exclusion in choice.excluded):
        cost = min((estimate.cost_usd for estimate in near), key=lambda value: value.high)
        least += f"; the cheapest costs {money(cost.mean)}, or {money(cost.high)} at the upper end"
    return least


def breach(exclusion: Exclusion, limits: Limits) -> str:
    """Return a sentence that describes how a candidate exceeds a limit."""
    if exclusion.limit == "interruptions":
        return "it would practically never finish because of spot interruptions."
    if exclusion.limit == "max_global_batch_size":
        batch = exclusion.estimate.configuration.global_batch_size
        return f"its global batch {batch} is above the limit of {limits.max_global_batch_size}."
    of_time = exclusion.limit == "deadline_s"
    what, said, text, unit = ("time", "deadline", duration, "s") if of_time else ("cost", "budget", money, "USD")
    value, most = next(
        (value, most) for name, value, most in limits.of_totals(exclusion.estimate) if name == exclusion.limit
    )
    mean, high, top = (text(amount) for amount in (value.mean, value.high, most))
    if top in (mean, high):  # the texts are equal after rounding
        mean, high, top = (f"{amount:,.4f} {unit}" for amount in (value.mean, value.high, most))
    if exclusion.certain:
        return f"its expected {what}, {mean}, is above the {said} of {top}."
    return f"its expected {what} is {mean}, but {high} at the upper end of its interval, above the {said} of {top}."


def savings(chosen: wire.Candidate | None, candidates: Sequence[wire.Candidate]) -> tuple[float | None, float | None]:
    """Return the fractions of time that the choice saves over the smallest and the largest batch.

    Only batches on the same number of nodes are compared.
    """
    if chosen is None:
        return None, None
    mine, time_s = chosen.configuration, chosen.total_time_s.value
    peers = [
        c
        for c in candidates
        if (c.configuration.num_nodes, c.configuration.variant, c.spot) == (mine.num_nodes, mine.variant, chosen.spot)
    ]
    smallest, *_, largest = sorted((*peers, chosen), key=lambda c: c.global_batch_size)
    return 1.0 - time_s / smallest.total_time_s.value, 1.0 - time_s / largest.total_time_s.value


def describe_configuration(c: Configuration) -> str:
    """Return a short description of a configuration."""
    options = "".join(f", {option(name, value)}" for name, value in c.options)
    return f"{cluster_name(c)} at a global batch of {c.global_batch_size}{options}"


def _named(estimate: Estimate) -> str:
    return describe_configuration(estimate.configuration) + (" on spot capacity" if estimate.spot else "")


def _candidate(
    answer: Answer,
    estimate: Estimate,
    frontier: Collection[tuple[Configuration, bool]],
    breaches: Mapping[tuple[Configuration, bool], str],
) -> wire.Candidate:
    c, evidence = estimate.configuration, answer.evidence
    fits = evidence.memory.fit_probability(c)
    excluded = evidence.ruled_out.get(c) or breaches.get(estimate.key) or _excluded_by(answer, c, fits)
    tokens, priced = answer.data.tokens_per_example, answer.choice.goal.priced
    per_step = None if tokens is None else tokens * c.global_batch_size
    millions = None if tokens is None else tokens * answer.spec.dataset.size * answer.spec.epochs / 1e6
    return wire.Candidate(
        configuration=c,
        global_batch_size=c.global_batch_size,
        step_time_s=to_wire_estimate(estimate.step_time_s),
        epoch_time_s=to_wire_estimate(estimate.epoch_time_s),
        total_time_s=to_wire_estimate(estimate.time_s),
        cost_usd=to_wire_estimate(estimate.cost_usd) if priced else None,
        tokens_per_step=per_step,
        tokens_per_s=None if per_step is None else _ratio(per_step, estimate.step_time_s),
        usd_per_million_tokens=to_wire_estimate(estimate.cost_usd, millions) if priced and millions else None,
        **_energy(answer, estimate),
        joules_per_example=_joules_per_example(answer, estimate),
        memory_bytes=None if estimate.peak_bytes is None else to_wire_estimate(estimate.peak_bytes),
        memory_fits=fits,
        unproved=not evidence.memory.is_proved(c),
        terms=wire.Terms(
            compute_time_s=estimate.terms["compute_s"],
            exposed_comm_time_s=max(0.0, estimate.terms["exposed_comm_s"]),
            input_time_s=estimate.terms["input_s"],
        ),
        spot=estimate.spot,
        profiled=estimate.measured,
        extrapolated=estimate.extrapolated,
        dominated=excluded is None and estimate.key not in frontier,
        excluded_by=excluded,
        statistical_efficiency=None if answer.efficiency is None else answer.efficiency.of(c.global_batch_size),
        learning_rate_factor=suggest_learning_rate(answer, c).factor,
        measured_step_time_s=evidence.measured.get(c),
    )


def _energy(answer: Answer, estimate: Estimate) -> dict[str, wire.Estimate]:
    """Return the energy, its cost and its CO2 as fields of `wire.Candidate`, or {} if no run reported energy."""
    kwh, spec = estimate.energy_kwh, answer.data.spec
    if kwh is None:
        return {}
    fields = {"energy_kwh": kwh}
    if spec.usd_per_kwh is not None:
        fields["energy_usd"] = kwh.scaled(spec.usd_per_kwh)
    if spec.gco2_per_kwh is not None:
        fields["energy_gco2"] = kwh.scaled(spec.gco2_per_kwh)
    return {name: to_wire_estimate(value) for name, value in fields.items()}


def _joules_per_example(answer: Answer, estimate: Estimate) -> wire.Estimate | None:
    if estimate.energy_kwh is None:
        return None
    spec = answer.data.spec
    return to_wire_estimate(estimate.energy_kwh.scaled(JOULES_PER_KWH / (spec.dataset.size * spec.epochs)))


def _excluded_by(answer: Answer, c: Configuration, fits: float | None) -> str | None:
    """Return a reason other than a limit for which this candidate must not be chosen, or None if there is none.

    `fits` is the candidate's probability of fitting into memory.
    """
    if c in answer.doubtful:
        return f"the probability that it fits into memory is only {percent(fits, digits=0)}."
    if c in answer.choice.ineligible - answer.evidence.failed:
        return "its options have not been launched on this cluster."
    if c in answer.evidence.failed:
        return "its profiling run failed; fix the cause and register the job again to retry it."
    return None


def to_wire_estimate(value: Interval, per: float = 1.0) -> wire.Estimate:
    """Return an interval as a wire estimate, divided by `per`."""
    return wire.Estimate(value=value.mean / per, low=value.low / per, high=value.high / per)


def _ratio(amount: float, per: Interval) -> wire.Estimate:
    """Return `amount` divided by the uncertain value `per`."""
    return wire.Estimate(value=amount / per.mean, low=amount / per.high, high=amount / per.low)


def _warnings(answer: Answer) -> list[str]:
    """Return warnings about information missing from the specification or the measurements, each with a remedy."""
    spec, bounds = answer.data.spec, answer.evidence.memory.max_local_batch_size
    sentences = [
        f"Nothing limits the local batch of {name}, so the smallest batch was doubled at most five times; "
        "set cluster.memory_bytes_per_rank or batch.max_local_batch_size."
        for name in (cluster.instance_type for cluster in spec.cluster)
        if spec.batch.max_local_batch_size is None and Variant(name, spec.base_options) not in bounds
    ]
    if (total := spec.batch.global_batch_size) is not None:
        for cluster in spec.cluster:
            tried = job_data.powers_of_two(cluster.min_nodes, cluster.max_nodes)
            if uneven := [str(nodes) for nodes in tried if total % (nodes * cluster.ranks_per_node)]:
                sentences.append(
                    f"{', '.join(uneven)} nodes of {cluster.instance_type} are excluded, because "
                    f"batch.global_batch_size = {total} is not a multiple of their number of ranks."
                )
    if not job_data.has_prices(spec):
        sentences.append(
            "No price is specified, so candidates are ranked by node-hours; set cluster.price to rank them by cost."
        )
    elif not answer.choice.goal.priced:
        sentences.append(
            "A price per GB-hour cannot be applied before memory use is known, so candidates are ranked by "
            "node-hours and the budget is ignored; profile a configuration, or set model.activation_bytes_per_sample "
            "and model.parameters."
        )
    return sentences


def find_gaps(model: StepTimeModel) -> list[str]:
    """Return sentences that describe missing and contradictory measurements."""
    if model.observations is None:
        return ["Nothing was measured, so every figure comes from hardware data or from other jobs."]
    rows = model.observations.points.rows()
    sentences = [
        f"Repeated runs at world size {world:.0f} and local batch {batch:.0f} contradict one another "
        f"({duration(least)} to {duration(most)}); their median is used."
        for (_, _, world, batch, _), (least, most) in zip(rows, model.extremes.tolist(), strict=True)
        if most > _CONTRADICTION * least
    ]
    sentences += _implausible(list(zip(rows, model.observations.step_time_s.tolist(), strict=True)))
    if len(rows) == 1:
        sentences.append("One configuration was measured, so only the scale is known; all other effects are assumed.")
    elif len({batch for _, _, _, batch, _ in rows}) == 1:
        sentences.append("All runs had the same local batch, so the effect of the batch size is an assumption.")
    if len(rows) > 1 and len({world for _, _, world, _, _ in rows}) == 1:
        sentences.append("All runs had the same cluster size, so the effect of the cluster size is an assumption.")
    return sentences + [
        f"The form {model.form} of {variant.instance_type} needs two configurations; until two have been measured, the "
        "form overlap is used."
        for variant, fit in model.paper_fits.items()
        if fit is None
    ]


def _implausible(rows: Sequence[tuple[PointKey, float]]) -> list[str]:
    """Return a warning about the worst pair of runs in which the run with less work took far longer."""
    pairs = (
        (slow / fast, smaller, larger)
        for smaller, slow in rows
        for larger, fast in rows
        if _has_less_to_do(smaller, larger)
    )
    ratio, smaller, larger = max(pairs, default=(0.0, None, None))
    if smaller is None or larger is None or ratio <= _IMPLAUSIBLE:
        return []
    said = [f"{n:.0f} node{'s' if n > 1 else ''} at local batch {batch:.0f}" for _, n, _, batch, _ in (smaller, larger)]
    return [
        f"A step of {said[0]} took {multiple(ratio)} times as long as one of {said[1]}, which has more work to do. "
        "Conditions must have differed between the two runs (such as the number of threads, or other work on the "
        "node); measure both again with `tula tune --again`."
    ]


def _has_less_to_do(one: PointKey, other: PointKey) -> bool:
    """Return True if `one` differs from `other` only in having fewer nodes, or only in having a smaller batch."""
    (variant, nodes, world, batch, steps), (other_variant, other_nodes, other_world, other_batch, other_steps) = (
        one,
        other,
    )
    if (variant, steps) != (other_variant, other_steps) or not math.isclose(world / nodes, other_world / other_nodes):
        return False
    return (nodes < other_nodes and batch == other_batch) or (nodes == other_nodes and batch < other_batch)


def _unequal_lengths(seen: Sequence[float]) -> list[str]:
    if not seen or max(seen) - min(seen) <= _EQUAL_LENGTHS * (mean := fmean(seen)):
        return []
    return [
        f"Batches had {min(seen):.0f} to {max(seen):.0f} tokens per example, and step times apply to the mean, "
        f"{mean:.0f}; measure enough steps to cover all lengths, or group examples of similar length."
    ]


def _waits_for_data(answer: Answer) -> list[str]:
    """Return a warning if the chosen candidate waits for data, with the time and cost caused by this wait."""
    chosen = answer.choice.chosen
    if chosen is None:
        return []
    share = chosen.terms["input_s"] / chosen.step_time_s.mean
    if share < _NOTABLE_INPUT:
        return []
    saved = f"{duration(share * chosen.time_s.mean)} of {duration(chosen.time_s.mean)}"
    if answer.choice.goal.priced:
        saved += f" and {money(share * chosen.cost_usd.mean)} of {money(chosen.cost_usd.mean)}"
    return [
        f"{_named(chosen)} waits for data {percent(share, digits=0)} of the time, and no batch size can avoid this; "
        f"more or faster data-loader workers would save up to {saved}."
    ]


def _large_convolutions(spec: wire.JobSpec, evidence: Evidence) -> list[str]:
    """Return a warning if some local batches are so large that cuDNN uses slower kernels for a convolution."""
    elements = spec.model.convolution_elements_per_sample
    if elements is None or all(c.local_batch_size * elements < hardware.MANY_ELEMENTS for c in evidence.candidates):
        return []
    first = math.ceil(hardware.MANY_ELEMENTS / elements)
    return [
        f"With a local batch of {first} or more, a convolution has at least 2^31 elements, for which cuDNN uses slower "
        "kernels (an H100 took 18 to 39 % longer per example); measure such a batch, or use micro-steps instead."
    ]


def _memory_of_chosen(answer: Answer) -> list[str]:
    """Return a warning if the chosen local batch has not run for three steps, or if it filled the device."""
    chosen, memory = answer.choice.chosen, answer.evidence.memory
    if chosen is None or not answer.evidence.rows:
        return []
    c = chosen.configuration
    if not memory.is_proved(c):
        return [f"Unproved: no run has taken three steps with {_named(chosen)} or a larger local batch; measure it."]
    if retries := memory.retries(c):
        return [
            f"The device was full {retries} times when {_named(chosen)} ran, so its steps waited for memory; use a "
            "smaller local batch (batch.max_local_batch_size)."
        ]
    return []


def _smaller_batch(choice: Choice, chosen: Estimate) -> str:
    """Return a sentence that explains why the chosen batch is smaller than the fastest candidate's."""
    quick = choice.least_time
    if quick is None or quick.configuration.global_batch_size <= chosen.configuration.global_batch_size:
        return ""
    other = "" if quick is choice.runner_up else f" {_named(quick)} {_difference(choice, chosen, quick)};"
    return f"Larger batches tend to generalise worse;{other} use the objective time or cost if you accept this."


def _max_sensible_batch_size(answer: Answer) -> int | None:
    """Return the largest batch that the gradient noise supports, or None if only short runs have measured the noise."""
    if answer.efficiency is None or answer.data.settled_noise_scale is None:
        return None
    return answer.efficiency.max_sensible_batch_size


def suggest_learning_rate(
    answer: Answer, c: Configuration, efficiency: StatisticalEfficiency | None = None
) -> LearningRate:
    """Return the suggested learning rate of a configuration; `efficiency` defaults to the answer's efficiency."""
    batch, base, efficiency = c.global_batch_size, answer.base_batch_size, efficiency or answer.efficiency
    by_noise_scale = None if efficiency is None else efficiency.learning_rate_factor(batch)
    return LearningRate(
        answer.spec.model,
        base,
        batch / base,
        by_noise_scale,
        settled=answer.data.settled_noise_scale is not None,
        divided=c.world_size * c.grad_accum_steps > 1,
    )


def nearest_misses(choice: Choice) -> dict[str, Exclusion]:
    """Return, for each limit, the candidate that exceeds it by the least; ties are broken by the objective's value.

    Candidates that no deadline or budget would admit come last, because these candidates would remain excluded if the
    limits were changed.
    """
    barred = choice.barred
    missed = [exclusion for exclusion in choice.excluded if exclusion.estimate is not choice.chosen]
    missed.sort(
        key=lambda exclusion: (
            exclusion.estimate.key in barred,
            exclusion.share,
            choice.goal.value(exclusion.estimate).mean,
        )
    )
    return {exclusion.limit: exclusion for exclusion in reversed(missed)}


def _difference(choice: Choice, chosen: Estimate, other: Estimate) -> str:
    """Return a description of how another candidate differs from the chosen one in time, cost and batch."""
    parts = [f"takes {_compared(other.time_s.mean / chosen.time_s.mean, 'as long', 'longer', 'less time')}"]
    if choice.goal.priced and chosen.cost_usd.mean > 0:
        parts.append(f"costs {_compared(other.cost_usd.mean / chosen.cost_usd.mean, 'as much', 'more', 'less')}")
    ratio = other.configuration.global_batch_size / chosen.configuration.global_batch_size
    factor = {0.5: "half", 2.0: "twice"}.get(ratio, f"{multiple(ratio)} times")
    return " and ".join(parts) + ("" if ratio == 1 else f", at {factor} the batch")


def _compared(ratio: float, same: str, more: str, less: str) -> str:
    if ratio >= 2.0:
        return f"{multiple(ratio)} times {same}"
    change = percent(abs(ratio - 1.0))
    return same if change == percent(0.0) else f"{change} {more if ratio > 1.0 else less}"
