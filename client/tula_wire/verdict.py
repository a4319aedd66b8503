"""The verdict on a run, with the same rule for agent and service: a diagnosis, its evidence, and a next step with its
worth.

This is pure arithmetic on measured steps without numpy, so that the agent can use it everywhere.
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
"""Least share of a step at which a wait is a diagnosis, by the lower end of its interval; nodes differ by as much."""
COMPUTE_SHARE: Final = 0.85
"""Least share of a step at which forward, backward and optimizer limit the speed, since all waits are small.
"""
LAUNCH_SHARE: Final = 0.5
"""Least share of the compute time at which it is limited by starting operations.

Both times are measured on the host, where they add up; on an accelerator, starting overlaps with running, and the
operations of the optimizer, which are not counted, fill the rest.
"""
FEWEST_SPLIT: Final = 3
"""Fewest steps with measured communication for its share; during training, DDP times only a few steps.
"""
FEWEST_RETRIES: Final = 3
"""Fewest requests that found the device full for a diagnosis of memory; one or two are the allocator's search for
its blocks in the first steps.
"""
STRAGGLER_STEPS: Final = 0.5
"""Share of the steps with a slowest rank in which a rank must be the slowest to be named."""
WAITING_ROUNDS: Final = 0.5
"""Share of the rounds of the loader's workers that must wait before more workers are sure to help; a smaller share
is a stall of the storage or of one batch, which more workers may not remove.
"""
MOST_MORE_WORKERS: Final = 16
"""Most workers to recommend in addition to the loader's own, if the number of cores is unknown."""
BLOCKS: Final = 10
"""Number of blocks in which consecutive steps are averaged before their spread is computed; neighbours are correlated.
"""


class Verdict(WireModel):
    """A diagnosis of a run, its evidence, and the next step with its worth."""

    diagnosis: Diagnosis = Field(
        description="What bounds its speed; `healthy`: no single cause that is worth a change; `unknown`: too little "
        "is measured."
    )
    evidence: str = Field(description="What shows it, in one sentence.")
    next_step: str = Field(description="What to do next, in one sentence.")
    saves: Estimate | None = optional(
        "Share of the time of a step (0 to 1) that the next step saves, with a 90 % interval over the steps; null: "
        "what is measured does not tell."
    )
    at_most: bool = Field(False, description="True: `saves` is an upper bound, not an expectation.")
    straggler_rank: Rank | None = optional("The rank that the others wait for; null: none stands out.")
    steps: int = Field(description="Number of measured steps on which it rests.")


@dataclass(frozen=True)
class Steps:
    """Measured steps of the first rank after warm-up, oldest first; all columns have the same length, times are in
    seconds.

    A step without a measurement has None. `exposed_comm_time_s` is the communication itself, `skew_s` the additional
    time that the fastest rank waited for the slowest, and `straggler_rank` the slowest rank if one stands out.
    """

    step_time_s: Sequence[float]
    input_time_s: Sequence[float | None]
    exposed_comm_time_s: Sequence[float | None]
    skew_s: Sequence[float | None]
    straggler_rank: Sequence[int | None]


def diagnose(steps: Steps, host: HostFacts | None = None, memory: MemoryBreakdown | None = None) -> Verdict:
    """Return the verdict on these steps: the cause that takes the largest share of a step, if that share is large
    enough.

    A share is the total time of the cause divided by the total of the step times, since time and money are sums; its
    interval comes from its variation over the steps. The next step saves at most that share, and the saving is stated
    as an expectation only if it can be computed: loader workers divide the time of loading, and accumulation halves the
    communication per example. Memory has no share; it is the diagnosis only if there is no wait.
    """
    host, measured = host or HostFacts(), len(steps.step_time_s)
    if measured < FEWEST_STEPS:
        return _unknown(f"{count(measured)} steps are measured", measured)
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
        return _unknown("communication is not measured, since no DistributedDataParallel model was seen", measured)
    return _no_cause(input_share, comm_share, skew_share, 1.0 - waits, measured)


def sentence(verdict: Verdict) -> str:
    """Return the verdict as text, which is the same in the terminal, on the page and in the agent's log."""
    title = verdict.diagnosis.replace("_", "-")
    return f"{title[:1].upper()}{title[1:]}: {verdict.evidence} Next: {verdict.next_step}{worth(verdict)}"


def worth(verdict: Verdict) -> str:
    """Return the saving of the next step as the end of the text, such as ` It saves 31 % [25, 36] of a step.`"""
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
    evidence = f"it waits for data {percent(share.value, digits=0)} of a step{with_workers}."
    if workers is None:
        next_step = "load ahead of the training in processes of a DataLoader (num_workers), or make loading cheaper."
        return _verdict("input_bound", evidence, next_step, measured, _bound(share), at_most=True)
    enough = _enough_workers(share.value, workers)
    usable = min(enough, workers + MOST_MORE_WORKERS if host.cores is None else host.cores)
    if usable <= workers:
        next_step = (
            f"make loading cheaper, since {workers} workers have the {host.cores} cores of this rank: decode and "
            "resize once, before the training, or read fewer, larger files."
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

    If all workers are too slow, they deliver their batches together, so one step of a round waits and the others do
    not.
    """
    pairs = zip(steps.input_time_s, steps.step_time_s, strict=True)
    rows = [(data, whole) for data, whole in pairs if data is not None]
    size = max(1, workers)
    rounds = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    waiting = sum(sum(data for data, _ in row) >= WAIT_SHARE * sum(whole for _, whole in row) for row in rounds)
    return waiting >= FEWEST_SPLIT and waiting > WAITING_ROUNDS * len(rounds)


def _enough_workers(waits: float, workers: int) -> int:
    """Return the number of workers that can load a batch per step, in the time of the rest of a step.

    Without workers, the wait is the whole time of loading. With n workers, all busy because training waits, loading a
    batch takes n steps.
    """
    rest = max(1.0 - waits, 1e-3)
    return max(workers + 1, math.ceil((workers or waits) / rest))


def _saved_by_workers(waits: float, workers: int, now: int) -> float:
    """Return the share of a step saved by `now` workers, if a step takes the longer of loading and the rest."""
    loading = (workers or waits) / now
    return 1.0 - max(1.0 - waits, loading)


def _communication_bound(share: Estimate, steps: int) -> Verdict:
    evidence = f"it waits for communication that no compute hides {percent(share.value, digits=0)} of a step."
    next_step = (
        "accumulate twice as many micro-steps under no_sync(), which halves this for an example; the global batch "
        "doubles, and the recommendation says what that does to the accuracy."
    )
    return _verdict("communication_bound", evidence, next_step, steps, _mapped(share, lambda waits: waits / 2.0))


def _straggler(share: Estimate, steps: Steps, measured: int) -> Verdict:
    named = Counter(rank for rank in steps.straggler_rank if rank is not None)
    rank, times = named.most_common(1)[0] if named else (None, 0)
    slower = multiple(1.0 / max(1.0 - share.value, 1e-3))
    waits = f"{percent(share.value, digits=0)} of a step"
    if rank is None or times <= STRAGGLER_STEPS * named.total():
        evidence = f"ranks wait for the slowest one up to {waits}, and it is not always the same one."
        next_step = "give all ranks batches of equal work, such as sequences sorted by length."
        return _verdict("straggler", evidence, next_step, measured, _bound(share), at_most=True)
    evidence = f"rank {rank} takes {slower} times as long as the fastest rank, which waits {waits} for it."
    next_step = (
        f"compare the node of rank {rank} with the others (clocks, other processes, its disk), and replace it or give "
        "the rank less work."
    )
    verdict = _verdict("straggler", evidence, next_step, measured, _bound(share), at_most=True)
    return verdict.model_copy(update={"straggler_rank": rank})


def _launch_bound(operations: int, of_compute: float, of_step: float, steps: int) -> Verdict:
    evidence = (
        f"starting the {count(operations)} small operations of a step takes {percent(of_compute, digits=0)} of its "
        "compute time."
    )
    next_step = "use torch.compile, which joins operations, or a larger local batch, for which as many are started."
    saves = Estimate(value=of_step, low=0.0, high=of_step)
    return _verdict("launch_bound", evidence, next_step, steps, saves, at_most=True)


def _memory_bound(memory: MemoryBreakdown, steps: Steps) -> Verdict:
    full = memory.reserved_bytes or memory.peak_bytes
    of_device = f", and holds {percent(full / memory.capacity_bytes, digits=0)} of it" if memory.capacity_bytes else ""
    evidence = (
        f"the allocator found the device full {memory.alloc_retries} times, each time waiting until cached memory was "
        f"given back{of_device}."
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
            f"forward, backward and optimizer take {percent(compute, digits=0)} of a step, and nothing is waited for."
        )
        next_step = (
            "nothing holds it up: a lower precision or a faster device shortens a step, more nodes the training."
        )
        return _verdict("compute_bound", evidence, next_step, steps)
    most = max(waits, key=lambda name: waits[name].value)
    evidence = (
        f"no wait is sure to take a tenth of a step: the longest, for {most}, takes {_with_interval(waits[most])} of "
        f"it, and compute {percent(compute, digits=0)}."
    )
    return _verdict("healthy", evidence, "nothing: no single change is worth much.", steps)


def _unknown(why: str, steps: int) -> Verdict:
    next_step = (
        f"measure at least {FEWEST_STEPS} steps after the warm-up, with run.watch(model, optimizer) in a script that "
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
    """Return a part's share of the step times, over the steps with a measurement; None if there are too few.

    The interval is that of a ratio: it comes from the spread, over blocks of steps, of the part's time minus its share.
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
    """Return the compute time of a fast step, because the time of a launch is also the fastest of several."""
    rows = zip(steps.step_time_s, steps.input_time_s, steps.exposed_comm_time_s, steps.skew_s, strict=True)
    compute = [t - (data or 0.0) - comm - (skew or 0.0) for t, data, comm, skew in rows if comm is not None]
    return max(1e-9, quantiles(compute, n=4)[0])


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
