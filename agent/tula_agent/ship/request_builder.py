"""Combines the ranks' measurements of a step, and builds the requests with samples and telemetry on the shipping
thread.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from tula_agent.guard import Guard, logger
from tula_agent.launch import Launch
from tula_agent.rank_channel import Channel
from tula_agent.readings import CommTiming, Interval, Readings, StepTiming, take
from tula_agent.ship.otel import OtelMetrics
from tula_agent.ship.spool import SpooledRequest, encode
from tula_agent.ship.verdict_log import StepRow, VerdictLog
from tula_wire import routes

HOLD_S = 5.0
"""Seconds that a row waits for the other ranks' times of the same step."""
HOLD_AT_END_S = 1.5
"""Seconds that a row waits for other ranks at the end of the run, when all ranks are about to exit."""
KEPT_STEPS = 16
"""Number of steps to wait for DDP's times, which DDP publishes one or two steps later."""
MAX_ROWS = 5_000
"""Maximum number of rows per request; the service accepts twice as many."""
MAX_COLUMNS = 64
MAX_VALUES = 60_000
"""Maximum numbers of columns and values per telemetry request; at up to 14 bytes each, values fit MAX_BODY_BYTES."""
MAX_NAMES = 1_000
"""Maximum number of metrics in a run; the service has the same limit."""
STRAGGLER_SHARE = 0.02
"""Minimum skew, as a fraction of the step time, at which a straggler is reported."""


class StepSplit(NamedTuple):
    """Times of one step over all ranks, in seconds.

    `straggler_rank` is None if all ranks arrive at the same time.
    """

    compute_time_s: float
    comm_time_s: float
    exposed_comm_time_s: float
    skew_s: float | None = None
    straggler_rank: int | None = None


@dataclass
class SampleRow:
    """Row to be sent, with the measurements of one step.

    `split` is None if communication was not measured. `held_since` is the time at which the row was created, from
    `time.monotonic`.
    """

    timing: StepTiming
    warmup: bool
    method: str = "wall"
    split: StepSplit | None = None
    held_since: float = 0.0


def split_over_ranks(timings: Mapping[int, CommTiming]) -> StepSplit:
    """Return the split of one step, computed from every rank's timing; `timings` is keyed by rank.

    The last rank to arrive does not wait for other ranks, so the smallest exposed time is the communication itself. The
    largest additional wait of another rank is the skew, and the rank that waits least is the straggler. Compute time is
    the median over ranks.
    """
    exposed = {rank: timing.exposed_comm_time_s for rank, timing in timings.items()}
    least = min(exposed.values())
    skew = max(exposed.values()) - least
    step_time = max(timing.step_time_s for timing in timings.values())
    last = min(exposed, key=lambda rank: (exposed[rank], rank))
    return StepSplit(
        compute_time_s=median(timing.compute_time_s for timing in timings.values()),
        comm_time_s=min(timing.comm_time_s for timing in timings.values()),
        exposed_comm_time_s=least,
        skew_s=skew,
        straggler_rank=last if skew > STRAGGLER_SHARE * step_time else None,
    )


class Identity(NamedTuple):
    """Identifies the process that measured; its fields are part of every request body."""

    rank: int
    boot_id: str
    world_size: int


class RequestBuilder:
    """Takes measurements from `readings`, combines the measurements of each step, and returns requests.

    identity, is_training: functions, because their results can change: a process may join another group or become a
    profiling run. device_use: a function that returns the device's current usage, which is sent as telemetry of the
    latest step. launch: the launch's batch sizes; samples are sent to the run of their batch size, and telemetry to the
    run of the whole batch. channel: a function that returns the connection to the other ranks, or None if there is
    none. Ranks other than the first send their `CommTiming`s to the first rank, and send the service only their memory
    and a summary of their steps. In the reported world size, `model_parallel_size` processes count as one rank.
    """

    def __init__(
        self,
        readings: Readings,
        launch: Launch,
        *,
        guard: Guard,
        identity: Callable[[], Identity],
        channel: Callable[[], Channel | None],
        is_training: Callable[[], bool],
        device_use: Callable[[], Mapping[str, float]] = dict,
        model_parallel_size: int = 1,
    ) -> None:
        self._readings = readings
        self._launch = launch
        self._ended: list[tuple[int, str]] = []
        self._guard = guard
        self._identity = identity
        self._channel = channel
        self._is_training = is_training
        self._device_use = device_use
        self._model_parallel_size = model_parallel_size
        self._rows: dict[int, SampleRow] = {}  # by step
        self._comm: dict[int, dict[int, CommTiming]] = {}  # by step and rank
        self._device: dict[int, Interval] = {}  # by step
        self._newest = -1  # step
        self._usual: dict[int, StepTiming] = {}  # the last steps, by step
        self._released: deque[int] = deque(maxlen=1000)
        self._verdict = VerdictLog()
        self._otel = OtelMetrics()
        self._told_host: set[int | None] = set()  # local batch sizes
        self._sequence = 0
        self._chunk = 0
        self._names = MetricNames()
        self.newest_values: dict[str, float] = {}
        """The newest value of each metric, by its name on the wire."""
        self._summary: deque[StepTiming] = deque(maxlen=1000)

    @property
    def waiting(self) -> int:
        """Return the number of rows that are waiting for the other ranks or for the device."""
        return len(self._rows)

    def collect(self, last: bool = False) -> list[SpooledRequest]:
        """Return the requests that are due; if `last` is True, wait briefly for the other ranks, and return all
        requests.
        """
        leads, measured = (
            self._identity().rank == 0,
            take(self._launch.measured),
        )  # before `steps`, so that no last step is missed
        self._ended += measured if leads else []
        taken = take(self._readings.steps)
        self._device.update(take(self._readings.device))
        for name, value in self._device_use().items() if taken else ():
            self._readings.add_value(taken[-1][0].step, name, value)
        channel = None
        if self._guard.works("reaching the other ranks"):
            with self._guard("reaching the other ranks"):
                channel = self._channel()
        due = self._collect_first(taken, channel, last) if leads else self._collect_other(taken, channel)
        if leads and self._is_training():
            with self._guard("the verdict"):
                self._verdict.say_when_due(self._readings.host, last=last)
        return due + self._ends() + self._telemetry()

    def _collect_first(
        self, taken: list[tuple[StepTiming, bool, bool]], channel: Channel | None, last: bool
    ) -> list[SpooledRequest]:
        now = time.monotonic()
        is_training = self._is_training()
        for timing, warmup, sampled in taken:
            self._newest = timing.step
            if is_training:
                self._readings.add_value(timing.step, "step_time_s", timing.step_time_s)
            if sampled:
                self._rows[timing.step] = SampleRow(timing, warmup, held_since=now)
            if not timing.uneven:
                self._usual[timing.step] = timing
        for comm in take(self._readings.comm):
            self._comm.setdefault(comm.step, {})[0] = comm
            # In training, a usual step that DDP timed gets a row even if it would not have been sampled.
            usual = self._usual.get(comm.step)
            if usual is not None and comm.step not in self._rows and comm.step not in self._released:
                usual = usual._replace(step_time_s=comm.step_time_s, input_time_s=comm.input_time_s)
                self._rows[comm.step] = SampleRow(usual, warmup=False, held_since=now)
        for step in list(self._usual)[:-KEPT_STEPS]:
            del self._usual[step]
        if channel is not None and self._comm:
            self._receive(channel, last)
        return self._samples(self._release(now, last))

    def _collect_other(
        self, taken: list[tuple[StepTiming, bool, bool]], channel: Channel | None
    ) -> list[SpooledRequest]:
        """Post times to the first rank; return requests with this rank's memory and median step time."""
        timings = take(self._readings.comm) if channel is not None else []
        if channel is not None and timings:
            with self._guard("sending times to the first rank"):
                channel.post([list(timing) for timing in timings])
        self._summary.extend(timing for timing, warmup, sampled in taken if sampled and not warmup)
        due = []
        for size in list(self._readings.memory):
            steps = [timing for timing in self._summary if timing.local_batch_size == size]
            if steps:
                usual = median(timing.step_time_s for timing in steps)
                due += self._samples([SampleRow(steps[-1]._replace(step_time_s=usual), warmup=False)])
        return due

    def _receive(self, channel: Channel, last: bool) -> None:
        """Receive the messages of the other ranks; at the end, wait up to HOLD_AT_END_S for missing messages."""
        if not self._guard.works("receiving times of the other ranks"):
            return
        ends = time.monotonic() + (HOLD_AT_END_S if last else 0.0)
        with self._guard("receiving times of the other ranks"):
            while True:
                for rank in range(1, channel.world_size):
                    for message in channel.collect(rank):
                        for step, *times in message:
                            self._comm.setdefault(int(step), {})[rank] = CommTiming(int(step), *times)
                complete = all(len(timings) == channel.world_size for timings in self._comm.values())
                if complete or time.monotonic() >= ends:
                    return
                time.sleep(0.02)

    def _release(self, now: float, last: bool) -> list[SampleRow]:
        """Return the rows that are complete or have waited long enough, in the order of their steps."""
        ready = []
        world_size = self._identity().world_size
        for step in [s for s in self._device if s <= self._newest and s not in self._rows]:
            self._device.pop(step).release()  # its row was dropped
        for step, row in sorted(self._rows.items()):
            if not self._timed_by_device(row, last):
                continue
            timings = self._comm.get(step, {})
            if len(timings) == world_size:
                row.method, row.split = "ddp_logger", split_over_ranks(timings)
                self._readings.add_value(step, "skew_s", row.split.skew_s or 0.0)
            elif self._readings.expects_comm and not last:
                # If DDP timed this step at all, it publishes the times one or two steps later.
                if now - row.held_since < HOLD_S and (0 in timings or self._newest < step + 3):
                    continue
            elif world_size == 1:
                row.split = StepSplit(row.timing.step_time_s - row.timing.input_time_s, 0.0, 0.0)
            del self._rows[step]
            self._released.append(step)
            self._comm.pop(step, None)
            ready.append(row)
        for step in [s for s in self._comm if s < self._newest - 10_000]:
            del self._comm[step]
        return ready

    def _timed_by_device(self, row: SampleRow, last: bool) -> bool:
        """Put the device's times into `row`; return False if the device has not finished the step yet.

        At the end of the run (`last`), an unfinished step keeps its wall times instead.
        """
        pending = self._device.get(row.timing.step)
        if pending is None:
            return True
        with self._guard("the device's clock"):
            timing = pending.poll()
            if timing is None and not last:
                return False
            if timing is not None and timing[0] > 0:
                step_s, waited_s, optimizer_s = timing
                if waited_s is None or row.timing.micro_steps > 1:
                    waited_s = row.timing.input_time_s  # only the host measures the waits of later micro-steps
                row.timing = row.timing._replace(
                    step_time_s=step_s, input_time_s=waited_s, optimizer_time_s=optimizer_s
                )
                row.method = "cuda_events"
        del self._device[row.timing.step]
        return True

    def _ends(self) -> list[SpooledRequest]:
        """Return the reports that end the runs of smaller batch sizes whose last rows have been sent."""
        held = {row.timing.local_batch_size for row in self._rows.values()}
        done = [(size, run_id) for size, run_id in self._ended if size not in held]
        self._ended = [ended for ended in self._ended if ended not in done]
        body = encode({"state": "succeeded"})
        return [SpooledRequest("PATCH", routes.RUN.format(run_id=run_id), body) for _, run_id in done]

    def _samples(self, rows: list[SampleRow]) -> list[SpooledRequest]:
        for row in rows:
            # Exclude the time in which the loader prepared examples that the script did not receive. If a framework
            # fetched the batch before the step began, the wait may have been longer than the step.
            timing = row.timing
            waited_s = min(timing.input_time_s, timing.step_time_s)
            further_s = waited_s * (1.0 - self._launch.batch_share(timing.local_batch_size))
            step_time_s, input_time_s = timing.step_time_s - further_s, waited_s - further_s
            row.timing = timing._replace(step_time_s=step_time_s, input_time_s=input_time_s)
            self._note(row)
        readings, identity, due = self._readings, self._identity(), []
        memory_of = {size: readings.memory.pop(size, None) for size in {row.timing.local_batch_size for row in rows}}
        replicas = max(1, identity.world_size // self._model_parallel_size)
        for body in sample_bodies(rows, identity._replace(world_size=replicas), self._sequence):
            size = body.get("local_batch_size")
            further = {
                "epochs_before": readings.epochs_before,
                "memory": memory_of[size],
                "energy_per_step_j": readings.energy_per_step_j.pop(size, None),
                "timeline": readings.timelines.pop(size, None),
                "machine": self._take_host(size),
                "all_reduces": readings.all_reduces,
            }
            readings.all_reduces = None
            if (memory := memory_of[size]) is not None:
                self._verdict.add_memory(memory)
            body |= {name: value for name, value in further.items() if value is not None}
            path = routes.RUN_SAMPLES.format(run_id=self._launch.find_run(size))
            due.append(SpooledRequest("POST", path, encode(body), len(body["sequence"])))
        self._sequence += len(rows)
        return due

    def _note(self, row: SampleRow) -> None:
        """Pass a training step to the verdict log and to OpenTelemetry."""
        if row.warmup or not self._is_training() or self._identity().rank:
            return
        timing, split = row.timing, row.split
        comm = (None, None, None) if split is None else (split.exposed_comm_time_s, split.skew_s, split.straggler_rank)
        self._verdict.add(timing.step, StepRow(timing.step_time_s, timing.input_time_s, *comm))
        if self._guard.works("OpenTelemetry"):
            with self._guard("OpenTelemetry"):
                self._otel.record(self._launch.find_run(None), timing.step_time_s, comm[0], timing.input_time_s)

    def _take_host(self, size: int | None) -> dict[str, Any] | None:
        """Return facts about the loader and the host, once for each batch size, since each may have a separate run."""
        host = self._readings.host
        if "cores" not in host or size in self._told_host or self._identity().rank:
            return None
        self._told_host.add(size)
        return dict(host)

    def _telemetry(self) -> list[SpooledRequest]:
        values = [
            (step, wire_name, value)
            for step, name, value in self._readings.take_values()
            if (wire_name := self._names.wire_name(name)) is not None
        ]
        self.newest_values.update({name: value for _, name, value in values})
        chunks = telemetry_bodies(values, self._identity(), self._chunk)
        self._chunk += len(chunks)
        path = routes.RUN_TELEMETRY.format(run_id=self._launch.find_run(None))
        return [SpooledRequest("POST", path, encode(chunk), len(chunk["steps"])) for chunk in chunks]


class MetricNames:
    """Assigns each metric that a script logs a unique, constant name for requests."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._is_full = False

    def wire_name(self, name: str) -> str | None:
        """Return the name to send (lower-case letters, digits, `_`; up to 64 characters), or None if MAX_NAMES
        other names exist.
        """
        if name not in self._names:
            if len(self._names) >= MAX_NAMES:
                self._say_full(name)
                return None
            taken = set(self._names.values())
            plain = re.sub(r"[^a-z0-9_]", "_", name.lower())
            plain = plain if plain[:1].isalpha() else f"m_{plain}"
            endings = ("", *(f"_{number}" for number in range(2, MAX_NAMES + 2)))
            chosen = next(choice for end in endings if (choice := plain[: 64 - len(end)] + end) not in taken)
            if chosen != name:
                logger.warning(
                    "The metric %r is sent as %r: a name may have at most 64 characters, which must be a-z, 0-9 or _.",
                    name,
                    chosen,
                )
            self._names[name] = chosen
        return self._names[name]

    def _say_full(self, name: str) -> None:
        if not self._is_full:
            logger.warning("More than %d metrics are logged: %r and any later ones are not sent.", MAX_NAMES, name)
        self._is_full = True


def sample_bodies(rows: list[SampleRow], identity: Identity, sequence: int) -> list[dict[str, Any]]:
    """Return the bodies of `POST .../samples` requests, grouped by batch size, accumulation, phase and method.

    Rows are numbered in order, beginning with `sequence`, before they are grouped.
    """
    groups: dict[tuple[Any, ...], list[tuple[int, SampleRow]]] = {}
    for number, row in enumerate(rows, start=sequence):
        key = (row.timing.local_batch_size, row.timing.micro_steps, row.warmup, row.method)
        groups.setdefault(key, []).append((number, row))
    bodies = []
    for (size, accumulation, warmup, method), members in groups.items():
        for start in range(0, len(members), MAX_ROWS):
            part = members[start : start + MAX_ROWS]
            body = {
                **identity._asdict(),
                "local_batch_size": size,
                "grad_accum_steps": accumulation,
                "timing_method": method,
                "warmup": warmup,
                "sequence": [number for number, _ in part],
                "step": [row.timing.step for _, row in part],
                "step_time_s": [_short(row.timing.step_time_s) for _, row in part],
                "input_time_s": [_short(row.timing.input_time_s) for _, row in part],
            }
            optional = {name: [getattr(row.split, name, None) for _, row in part] for name in StepSplit._fields}
            optional["optimizer_time_s"] = [row.timing.optimizer_time_s for _, row in part]
            for name, column in optional.items():
                if any(value is not None for value in column):
                    body[name] = [None if value is None else _short(value) for value in column]
            bodies.append({name: value for name, value in body.items() if value is not None})
    return bodies


def telemetry_bodies(values: list[tuple[int, str, float]], identity: Identity, sequence: int) -> list[dict[str, Any]]:
    """Return the bodies of `POST .../telemetry` requests, numbered from `sequence`; non-finite values become null."""
    by_step: dict[int, dict[str, float]] = {}
    for step, name, value in values:
        by_step.setdefault(step, {})[name] = value
    names = list(dict.fromkeys(name for _, name, _ in values))
    bodies: list[dict[str, Any]] = []
    for first in range(0, len(names), MAX_COLUMNS):
        columns = names[first : first + MAX_COLUMNS]
        steps = sorted(step for step, row in by_step.items() if not row.keys().isdisjoint(columns))
        most = min(MAX_ROWS, MAX_VALUES // (len(columns) + 1))
        for start in range(0, len(steps), most):
            part = steps[start : start + most]
            bodies.append(
                {
                    "rank": identity.rank,
                    "boot_id": identity.boot_id,
                    "sequence": sequence + len(bodies),
                    "steps": part,
                    "columns": {name: [_finite(by_step[step].get(name)) for step in part] for name in columns},
                }
            )
    return bodies


def _short(value: float) -> float:
    """Return `value` to six significant digits (0.1 us in a step of 100 ms), which halves the size of a request."""
    return value if isinstance(value, int) else float(f"{max(value, 1e-9) if value > 0 else 0.0:.6g}")


def _finite(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
