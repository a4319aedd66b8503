"""Computes the effect of each value of a job's options, and describes it in wire models with sentences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import tula_wire as wire
from tula_service.analysis.answer import Answer
from tula_service.perfmodel.choice import choose
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.variants import switches
from tula_wire.format import percent
from tula_wire.options import Options

_CHANGES_NUMERICS = frozenset({"precision"})


def best_with(answer: Answer, options: Options) -> Estimate | None:
    """Return the candidate with these options that best meets the objective, or None if there is no such candidate.

    If no launch has used these options, the choice is based on predictions.
    """
    failed = answer.evidence.failed
    alike = [
        estimate
        for estimate in answer.estimates
        if estimate.configuration.options == options and estimate.configuration not in failed
    ]
    sure = [estimate for estimate in alike if estimate.configuration not in answer.doubtful]
    return choose(answer.choice.goal, sure or alike).chosen if alike else None


def find_effects(answer: Answer) -> list[wire.OptionEffect]:
    """Return the effect of each option value except the first value of each option, or [] if nothing was measured."""
    chosen = answer.choice.chosen
    if answer.evidence.observed is None or chosen is None:
        return []
    launched = {c.options for c, _ in answer.evidence.rows}
    return [
        _effect(answer, chosen, name, value, launched)
        for name, (_, *further) in sorted(answer.data.spec.varied_options.items())
        for value in further
    ]


def _effect(
    answer: Answer, chosen: Estimate, name: str, value: str, launched_options: Collection[Options]
) -> wire.OptionEffect:
    held, first = chosen.configuration.options, answer.data.spec.options[name][0]
    recommended, launched = (name, value) in held, any((name, value) in options for options in launched_options)
    failed = answer.evidence.failed
    possible = {e.configuration.options for e in answer.estimates if e.configuration not in failed}
    pair = _compared(held, name, (first, value), launched_options, possible)
    before, after = (best_with(answer, options) for options in pair)
    ratios: dict[str, Interval] = {}
    most_gain = None
    if before is not None and after is not None:
        measures = {"time": _ratio(after, before, lambda e: e.time_s), "memory": _memory(answer, before, after)}
        if answer.choice.goal.priced:
            measures["cost"] = _ratio(after, before, lambda e: e.cost_usd)
        ratios = {of: ratio for of in ("time", "cost", "memory") if (ratio := measures.get(of)) is not None}
        if not launched:
            goal = answer.choice.goal
            gain = goal.value(after).over(goal.value(chosen))
            most_gain = 0.0 if gain is None else max(0.0, 1.0 - gain.low)
    runs = (run for run in answer.data.profile_runs if run.key > answer.data.retried_up_to_key)
    has_failed = any(run.state == "failed" and (name, value) in run.configuration.options for run in runs)
    left_out = answer.evidence.left_out.get((name, value))
    if left_out is None and after is None:
        left_out = _why_nothing(answer, name, value, pair[1] if pair[1] in possible else None)
    return wire.OptionEffect(
        option=name,
        value=value,
        base=first,
        launched=launched,
        recommended=recommended,
        **{of: wire.Estimate(value=ratio.mean, low=ratio.low, high=ratio.high) for of, ratio in ratios.items()},
        most_gain=most_gain,
        left_out=left_out,
        sentence=left_out
        or " ".join(_sentences(name, value, ratios, most_gain, recommended=recommended, has_failed=has_failed)),
    )


def _why_nothing(answer: Answer, name: str, value: str, limited: Options | None) -> str:
    """Return a sentence that explains why no candidate with this value remains.

    `limited` is a set of options with this value whose candidates all exceed the limits, or None if there is no such
    set.
    """
    beside = ""
    if limited is not None:
        others = [" ".join(pair) for pair in limited if pair[0] in answer.data.spec.varied_options and pair[0] != name]
        beside, reason = (f" with {' and '.join(others)}" if others else ""), "none of its candidates meets the limits"
    elif any((name, value) in e.configuration.options for e in answer.estimates):
        reason = "it failed in combination with all other values"
    else:
        reason = "none of its batches fits into memory"
    return f"{name} {value}{beside} is excluded because {reason}."


def _compared(
    held: Options,
    name: str,
    words: tuple[str, str],
    launched_options: Collection[Options],
    possible: Collection[Options],
) -> tuple[Options, Options]:
    """Return two sets of options that differ only in the option `name`, where each has one of the two `words`.

    Pairs in which both sets have candidates are preferred, then pairs in which both sets were launched, and then pairs
    that are closest to the recommended options `held`.
    """

    def distance(pair: tuple[Options, Options]) -> tuple[int, int, int, Options]:
        gone = sum(options not in possible for options in pair)
        unseen = sum(options not in launched_options for options in pair)
        return gone, unseen, min(len(switches(held, options)) for options in pair), pair[0]

    pairs = []
    for options in {held, *launched_options}:
        before, after = (tuple((o, word if o == name else now) for o, now in options) for word in words)
        pairs.append((before, after))
    return min(pairs, key=distance)


def _memory(answer: Answer, before: Estimate, after: Estimate) -> Interval | None:
    """Return the peak memory of `after` divided by that of `before`, both at the batch of `before`, if known."""
    batch, models = before.configuration.local_batch_size, answer.evidence.memory.models
    peaks = [
        None if (model := models.get(estimate.configuration.variant)) is None else model.predict(batch)
        for estimate in (before, after)
    ]
    return None if peaks[0] is None or peaks[1] is None else peaks[1].over(peaks[0])


def _ratio(after: Estimate, before: Estimate, value: Callable[[Estimate], Interval]) -> Interval | None:
    """Return the value of `after` divided by that of `before`, without the noise of single runs."""
    narrowed = (estimate.narrowed(value(estimate), estimate.known_sd) for estimate in (after, before))
    return next(narrowed).over(next(narrowed))


def _sentences(
    name: str,
    value: str,
    ratios: dict[str, Interval],
    most_gain: float | None,
    *,
    recommended: bool,
    has_failed: bool,
) -> Iterator[str]:
    if most_gain is not None:
        could = f"could save at most {percent(most_gain, digits=0)}" if most_gain >= 0.005 else "cannot save anything"
        was = "has failed in every launch; in other combinations, it" if has_failed else "was not launched; it"
        yield f"{name} {value} {was} {could}."
        return
    said = [_changed(ratio, what) for what, ratio in ratios.items() if what in ("time", "cost")]
    if not said:
        yield f"{name} {value} cannot be compared, because the first value of {name} has no candidate."
        return
    parts = " and ".join(said)
    memory = f", and at the same batch {_changed(ratios['memory'], 'memory')}" if "memory" in ratios else ""
    yield f"{name} {value} needs {parts}{memory}."
    if recommended and name in _CHANGES_NUMERICS:
        yield "This changes the numerical precision of training, so compare the losses with and without it first."


def _changed(ratio: Interval, what: str) -> str:
    """Return a ratio as text with its interval, such as `48 % [44, 52] less time`."""
    if ratio.low < 1.0 < ratio.high:
        most, least = (percent(share, digits=0) for share in (ratio.high - 1.0, 1.0 - ratio.low))
        return f"between {least} less and {most} more {what}"
    less = ratio.mean < 1.0
    ends = sorted((1.0 - end if less else end - 1.0) for end in (ratio.low, ratio.high))
    low, high = (f"{100.0 * end:.0f}" for end in ends)
    return f"{percent(abs(ratio.mean - 1.0), digits=0)} [{low}, {high}] {'less' if less else 'more'} {what}"
