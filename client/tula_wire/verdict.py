"""Computes the verdict on a run: a diagnosis, the evidence, and a next step with the share of time that it saves.

Agent and service use the same rules. The module is pure arithmetic on measured steps without numpy, so that the agent
can use it in any environment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles, stdev
from typing import Final, Literal

from pydantic import Field

from tula_wire._base import WireModel, optional
from tula_wire.format import count, multiple, percent
from tula_wire.host_facts import HostFacts
from tula_wire.jobs import Estimate
from tula_wire.memory_breakdown import MemoryBreakdown
from tula_wire.precision import FEWEST_STEPS, NORMAL_90, half_width
from tula_wire.samples import Rank

Diagnosis = Literal[
    "input_bound", "communication_bound", "launch_bound", "memory_bound", "straggler", "compute_bound", "healthy",
    "unknown",
]  # fmt: skip
"""The cause that limits the speed of a run; `unknown` if there are too few measurements."""

WAIT_SHARE: Final = 0.1
"""The share of a step that a wait must exceed to be a diagnosis, judged by the lower end of the share's interval.

The speeds of nodes differ by about as much.
"""
COMPUTE_SHARE: Final = 0.85
"""The minimum share of a step that computation must take for a run to be compute-bound."""
LAUNCH_SHARE: Final = 0.5
"""The minimum share of the compute time that starting operations must take for a run to be launch-bound.

Both times are measured on the host. On an accelerator, starting an operation overlaps with running others; the time
that remains is due to the optimizer's operations, which are not counted.
"""
FEWEST_SPLIT: Final = 3
"""The minimum number of measured steps for a share; during training, DDP times communication in only a few steps."""
FEWEST_RETRIES: Final = 3
"""The minimum number of allocations that found the device full for a run to be memory-bound.

One or two such allocations are normal while the allocator finds its block sizes in the first steps.
"""
STRAGGLER_STEPS: Final = 0.5
"""A rank is named as the straggler if it is slowest in more than this share of the steps that have a slowest rank."""
WAITING_ROUNDS: Final = 0.5
"""The share of rounds in which training must wait for data before more loader workers are certain to help.

A smaller share points to stalls of the storage or of single batches, which more workers might not remove.
"""
MOST_MORE_WORKERS: Final = 16
"""The maximum number of additional loader workers to recommend if the number of cores is unknown."""
BLOCKS: Final = 10
"""The number of blocks in which consecutive steps are averaged before computing a spread, since they are correlated."""


class Verdict(WireModel):
    """A diagnosis of a run, the evidence, and the next step with the share of time that it saves."""

    diagnosis: Diagnosis = Field(
        description="What limits the run's speed; `healthy` if no single cause is worth a change, `unknown` if there "
        "are too few measurements."
    )
    evidence: str = Field(description="The evidence for the diagnosis, in one sentence.")
    next_step: str = Field(description="What to do next, in one sentence.")
    saves: Estimate | None = optional(
        "Share of a step's time (0 to 1) that `next_step` would save, with a 90 % interval; null if the "
        "measurements do not show it."
    )
    at_most: bool = Field(False, description="Whether `saves` is an upper bound rather than an expectation.")
    straggler_rank: Rank | None = optional("The slowest rank, for which all others wait; null if no rank stands out.")
    steps: int = Field(description="Number of measured steps on which the verdict is based.")


@dataclass(frozen=True)
class Steps:
    """Measured steps of the first rank after warm-up, oldest first, as columns of equal length; times are in seconds.

    A value that was not measured is None. `exposed_comm_time_s` is the communication itself, `skew_s` the additional
    time for which the fastest rank waited for the slowest, and `straggler_rank` the slowest rank if one stands out.
    """

    step_time_s: Sequence[float]
    input_time_s: Sequence[float | None]
    exposed_comm_time_s: Sequence[float | None]
    skew_s: Sequence[float | None]
    straggler_rank: Sequence[int | None]


def diagnose(steps: Steps, host: HostFacts | None = None, memory: MemoryBreakdown | None = None) -> Verdict:
    """Return the verdict on these steps; it names the cause with the largest share of a step, if that share is large.

    A share is the total time due to the cause divided by the sum of the step times. Its interval is computed from
    the variation between steps. The next step saves at most that share. The saving is stated as an expectation only if
    it can be computed: loader workers divide the loading time, and accumulation halves the communication per example.
    Memory has no share, so it is diagnosed only if no other cause is found.
    """
    host, measured = host or HostFacts(), len(steps.step_time_s)
    if measured < FEWEST_STEPS:
        return _unknown(f"only {count(measured)} steps were measured", measured)
    input_share = _share(steps.input_time_s, steps.step_time_s)
    comm_share = _share(steps.exposed_comm_time_s, steps.step_time_s)
    skew_share = _share(steps.skew_s, steps.step_time_s)
    waits = sum(share.value for share in (input_share, comm_share, skew_share) if share is not None)
    causes: list[tuple[float, Verdict]] = []
    if input_share is not None and input_share.low >= WAIT_SHARE:
        causes.append((input_share.value, _input_bound(input_share, steps, host)))
    if comm_share is not None and comm_share.low >= WAIT_SHARE:
        causes.append((comm_share.value, _communication_bound(comm_share, measured)))
    if skew_share is not None and skew_share.low >= WAIT_SHARE:
        causes.append((skew_share.value, _straggler(skew_share, steps, measured)))
    if comm_share is not None and host.operations is not None and host.launch_time_s is not None:
        of_compute = min(1.0, host.operations * host.launch_time_s / _fast_compute_s(steps))
        of_step = of_compute * max(0.0, 1.0 - waits)
        if of_compute >= LAUNCH_SHARE:
            causes.append((of_step, _launch_bound(host.operations, of_compute, of_step, measured)))
    if causes:
        return max(causes, key=lambda cause: cause[0])[1]
    if memory is not None and (memory.alloc_retries or 0) >= FEWEST_RETRIES:
        return _memory_bound(memory, steps)
    if comm_share is None:
        return _unknown(
            "communication was not measured, since the agent found no DistributedDataParallel model", measured
        )
    return _no_cause(input_share, comm_share, skew_share, 1.0 - waits, measured)


def sentence(verdict: Verdict) -> str:
    """Return the verdict as text for the terminal, the web page and the agent's log."""
    title = verdict.diagnosis.replace("_", "-")
    return f"{title[:1].upper()}{title[1:]}: {verdict.evidence} Next: {verdict.next_step}{worth(verdict)}"


def worth(verdict: Verdict) -> str:
    """Return the last sentence of a verdict, such as ` It saves 31 % [25, 36] of a step.`, or an empty string."""
    saves = verdict.saves
    if saves is None:
        return ""
    if verdict.at_most:
        return f" It saves up to {percent(saves.value, digits=0)} of a step."
    return f" It saves {_with_interval(saves)} of a step."


# The diagnoses.


def _input_bound(share: Estimate, steps: Steps, host: HostFacts) -> Verdict:
    workers, measured = host.loader_workers, len(steps.step_time_s)
    with_workers = "" if workers is None else f", with num_workers={workers}"
    evidence = f"training spends {percent(share.value, digits=0)} of a step waiting for data{with_workers}."
    if workers is None:
        next_step = "load data ahead of time in DataLoader processes (num_workers), or make loading cheaper."
        return _verdict("input_bound", evidence, next_step, measured, _bound(share), at_most=True)
    enough = _enough_workers(share.value, workers)
    usable = min(enough, workers + MOST_MORE_WORKERS if host.cores is None else host.cores)
    if usable <= workers:
        next_step = (
            f"make loading cheaper, since {workers} workers already use the {host.cores} cores of this rank: decode "
            "and resize the data once before training, or read fewer, larger files."
        )
        return _verdict("input_bound", evidence, next_step, measured, _bound(share), at_most=True)
    more = f"{usable - workers} more" if workers else f"{usable}"
    plural = "s" if usable - workers > 1 else ""
    next_step = f"give the DataLoader {more} worker{plural} (num_workers={usable})."
    saves = _mapped(share, lambda waits: _saved_by_workers(waits, workers, usable))
    if _waits_in_most_rounds(steps, workers):
        return _verdict("input_bound", evidence, next_step, measured, saves)
    return _verdict("input_bound", evidence, next_step, measured, _bound(saves), at_most=True)


def _waits_in_most_rounds(steps: Steps, workers: int) -> bool:
    """Return True if training waits for data in most rounds; a round has as many steps as the loader has workers.

    Workers that are all too slow deliver their batches at about the same time, so only one step of a round waits.
    """
    pairs = zip(steps.input_time_s, steps.step_time_s, strict=True)
    rows = [(data, whole) for data, whole in pairs if data is not None]
    size = max(1, workers)
    rounds = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    waiting = sum(sum(data for data, _ in row) >= WAIT_SHARE * sum(whole for _, whole in row) for row in rounds)
    return waiting >= FEWEST_SPLIT and waiting > WAITING_ROUNDS * len(rounds)


def _enough_workers(waits: float, workers: int) -> int:
    """Return the number of workers that can load one batch in the time that a step takes without waiting for data.

    Without workers, the wait is the whole loading time. With n workers, which are all busy because training waits for
    them, loading a batch takes as long as n steps.
    """
    rest = max(1.0 - waits, 1e-3)
    return max(workers + 1, math.ceil((workers or waits) / rest))


def _saved_by_workers(waits: float, workers: int, now: int) -> float:
    """Return the share of a step that is saved if the loader has `now` workers instead of `workers`.

    A step takes either the loading time per batch or the time of everything else, whichever is longer.
    """
    loading = (workers or waits) / now
    return 1.0 - max(1.0 - waits, loading)


def _communication_bound(share: Estimate, steps: int) -> Verdict:
    evidence = f"training spends {percent(share.value, digits=0)} of a step waiting for communication."
    next_step = (
        "accumulate twice as many micro-steps under no_sync(), which halves the communication per example. This "
        "doubles the global batch; the recommendation says how that affects the accuracy."
    )
    return _verdict("communication_bound", evidence, next_step, steps, _mapped(share, lambda waits: waits / 2.0))


def _straggler(share: Estimate, steps: Steps, measured: int) -> Verdict:
    named = Counter(rank for rank in steps.straggler_rank if rank is not None)
    rank, times = named.most_common(1)[0] if named else (None, 0)
    slower = multiple(1.0 / max(1.0 - share.value, 1e-3))
    waits = f"{percent(share.value, digits=0)} of a step"
    if rank is None or times <= STRAGGLER_STEPS * named.total():
        evidence = f"ranks wait for the slowest rank for up to {waits}, and the slowest rank is not always the same."
        next_step = "give all ranks batches with equal work, for example by sorting sequences by length."
        return _verdict("straggler", evidence, next_step, measured, _bound(share), at_most=True)
    evidence = f"rank {rank} takes {slower} times as long as the fastest rank, which waits {waits} for it."
    next_step = (
        f"compare the node of rank {rank} with the others (clocks, other processes, disk), then replace the node or "
        "give the rank less work."
    )
    verdict = _verdict("straggler", evidence, next_step, measured, _bound(share), at_most=True)
    return verdict.model_copy(update={"straggler_rank": rank})


def _launch_bound(operations: int, of_compute: float, of_step: float, steps: int) -> Verdict:
    evidence = (
        f"starting the {count(operations)} small operations of a step takes {percent(of_compute, digits=0)} of its "
        "compute time."
    )
    next_step = "use torch.compile, which fuses operations, or a larger local batch, which needs no more operations."
    saves = Estimate(value=of_step, low=0.0, high=of_step)
    return _verdict("launch_bound", evidence, next_step, steps, saves, at_most=True)


def _memory_bound(memory: MemoryBreakdown, steps: Steps) -> Verdict:
    full = memory.reserved_bytes or memory.peak_bytes
    of_device = f"; {percent(full / memory.capacity_bytes, digits=0)} of it is in use" if memory.capacity_bytes else ""
    evidence = (
        f"the allocator found the device full {memory.alloc_retries} times, and each time had to free cached memory "
        f"first{of_device}."
    )
    next_step = "halve the local batch and accumulate twice as many micro-steps, or checkpoint activations."
    usual = median(steps.step_time_s)
    stalls = sum(max(0.0, time - usual) for time in steps.step_time_s) / math.fsum(steps.step_time_s)
    saves = Estimate(value=stalls, low=0.0, high=stalls)
    return _verdict("memory_bound", evidence, next_step, len(steps.step_time_s), saves, at_most=True)


def _no_cause(
    input_share: Estimate | None, comm_share: Estimate, skew_share: Estimate | None, compute: float, steps: int
) -> Verdict:
    shares = {"data": input_share, "communication": comm_share, "the slowest rank": skew_share}
    waits = {name: share for name, share in shares.items() if share is not None}
    if compute >= COMPUTE_SHARE:
        evidence = (
            f"forward, backward and optimizer take {percent(compute, digits=0)} of a step, so waiting takes little "
            "time."
        )
        next_step = (
            "no change is needed. A lower precision or a faster device shortens each step, and more nodes shorten the "
            "training."
        )
        return _verdict("compute_bound", evidence, next_step, steps)
    most = max(waits, key=lambda name: waits[name].value)
    evidence = (
        f"no wait is certain to exceed a tenth of a step. The longest wait, for {most}, takes "
        f"{_with_interval(waits[most])} of a step, and compute takes {percent(compute, digits=0)}."
    )
    return _verdict("healthy", evidence, "nothing, since no single change would save much.", steps)


def _unknown(why: str, steps: int) -> Verdict:
    next_step = (
        f"measure at least {FEWEST_STEPS} steps after the warm-up, and call run.watch(model, optimizer) if the script "
        "imports the agent."
    )
    return _verdict("unknown", f"{why}.", next_step, steps)


def _verdict(
    diagnosis: Diagnosis,
    evidence: str,
    next_step: str,
    steps: int,
    saves: Estimate | None = None,
    *,
    at_most: bool = False,
) -> Verdict:
    said = {"evidence": evidence, "next_step": next_step}
    return Verdict(diagnosis=diagnosis, saves=saves, at_most=at_most, steps=steps, **said)


# Shares and their intervals.


def _share(part_s: Sequence[float | None], step_time_s: Sequence[float]) -> Estimate | None:
    """Return the share of the step time that a part takes, or None if too few steps have a measurement of the part.

    The interval is that of a ratio estimator, computed from how much the residuals of blocks of steps vary. A residual
    is the mean time of the part minus `share` times the mean step time.
    """
    measured = [(part, whole) for part, whole in zip(part_s, step_time_s, strict=True) if part is not None]
    if len(measured) < FEWEST_SPLIT:
        return None
    size = max(1, len(measured) // BLOCKS)
    blocks = [measured[start : start + size] for start in range(len(measured) % size, len(measured), size)]
    parts = [fmean(part for part, _ in block) for block in blocks]
    wholes = [fmean(whole for _, whole in block) for block in blocks]
    share = math.fsum(parts) / math.fsum(wholes)
    beyond = stdev(part - share * whole for part, whole in zip(parts, wholes, strict=True))
    half = half_width(beyond, len(blocks), NORMAL_90) / fmean(wholes)
    return Estimate(value=_clipped(share), low=_clipped(share - half), high=_clipped(share + half))


def _fast_compute_s(steps: Steps) -> float:
    """Return the compute time of a fast step.

    `diagnose` compares this time with the launch time, which is also the fastest of several measurements.
    """
    rows = zip(steps.step_time_s, steps.input_time_s, steps.exposed_comm_time_s, steps.skew_s, strict=True)
    compute = [t - (data or 0.0) - comm - (skew or 0.0) for t, data, comm, skew in rows if comm is not None]
    return max(1e-9, quantiles(compute, n=10, method="inclusive")[0])  # the default extrapolates from few steps


def _mapped(share: Estimate, saved: Callable[[float], float]) -> Estimate:
    value, low, high = (saved(end) for end in (share.value, share.low, share.high))
    return Estimate(value=_clipped(value), low=_clipped(min(low, value)), high=_clipped(max(high, value)))


def _bound(share: Estimate) -> Estimate:
    return Estimate(value=share.value, low=0.0, high=share.high)


def _with_interval(share: Estimate) -> str:
    low, high = (percent(end, digits=0).removesuffix(" %") for end in (share.low, share.high))
    return f"{percent(share.value, digits=0)} [{low}, {high}]"


def _clipped(share: float) -> float:
    return min(1.0, max(0.0, share))
