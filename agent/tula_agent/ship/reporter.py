"""On the shipping thread: joins what the ranks saw of the same step, and writes the requests that are due."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

from tula_agent.channel import Channel, Meeting
from tula_agent.config import AgentConfig
from tula_agent.guard import Guard
from tula_agent.measure.device_clock import Interval
from tula_agent.measure.no_sync import Lap, split_by_alternation
from tula_agent.measure.step_timer import StepTiming
from tula_agent.measure.sync_split import Reading, Split, merge
from tula_agent.position import Position
from tula_agent.ship.columns import Rows, SampleRow, sample_bodies, telemetry_body
from tula_agent.ship.envelope import Envelope, encode
from tula_wire import routes

__all__ = ["Reporter"]

T = TypeVar("T")

HOLD_S = 5.0
"""How long a row waits for what the other ranks saw of its step."""
LAST_CALL_S = 1.5
"""The same at the end of the run, when every rank is leaving."""


class Reporter:
    """Rows in, requests out. `rows` and `readings` are filled by the training thread; everything else stays here."""

    def __init__(self, config: AgentConfig, guard: Guard, boot_id: str, world_size: Callable[[], int]) -> None:
        self.rows = Rows(config.row_limit)
        self.readings: deque[Reading] = deque(maxlen=config.row_limit)
        self.meeting: Meeting | None = None  # of the process group that the ranks train in now
        self.splits_expected = False
        self.alternates = False
        self.laps: deque[Lap] = deque(maxlen=config.row_limit)
        self.training = config.plan is None
        self.memory: dict[str, Any] | None = None
        self.epochs_before: float | None = None  # what training had behind it when this process began, where known
        self.config = config
        self._guard = guard
        self._boot_id = boot_id
        self._world_size = world_size
        self._held: dict[int, tuple[SampleRow, float]] = {}
        self._seen: dict[int, dict[int, Reading]] = {}
        self._laps: dict[int, list[Lap]] = {}
        self._marks: deque[tuple[int, Interval]] = deque()  # no longer than the pool that the events come from
        self._marked: dict[int, Interval] = {}
        self._newest = -1
        self._newest_timing: StepTiming | None = None
        self._released: deque[int] = deque(maxlen=1000)
        self._sequence = 0
        self._chunk = 0
        self._summary: deque[StepTiming] = deque(maxlen=1000)

    @property
    def _leads(self) -> bool:
        return self.config.rank == 0

    def begins_at(self, position: Position) -> None:
        """A loop begins. A script that was started again, and said nothing, may have loaded anything."""
        known = position.told or not self.config.restarted
        self.epochs_before = position.epochs_before if known else None

    def marked(self, step: int, interval: Interval) -> None:
        """On the training thread, before the step's row is added: the device will say how long the step took."""
        self._marks.append((step, interval))

    def collect(self, last: bool = False) -> list[Envelope]:
        """Requests that are due; `last` waits a moment for the other ranks and then keeps nothing back."""
        taken = self.rows.take_steps()
        self._marked.update(self._marks.popleft() for _ in range(len(self._marks)))
        channel = self._reach()
        if not self._leads:
            if channel is not None:
                self._tell_leader(channel)
            self._summary.extend(timing for timing, warmup, sampled in taken if sampled and not warmup)
            due = self._summarise()
        else:
            now = time.monotonic()
            mine, laps = _taken(self.readings), _taken(self.laps)
            for timing, warmup, sampled in taken:
                self._newest = max(self._newest, timing.step)
                if self.training:
                    self.rows.add_value(timing.step, "step_time_s", timing.step_time_s)
                if sampled:
                    self._held[timing.step] = (SampleRow(timing, warmup), now)
            if taken:
                self._newest_timing = taken[-1][0]
            for reading in mine:
                self._seen.setdefault(reading.step, {})[0] = reading
                self._hold_reading(reading, now)
            self._laps.setdefault(0, []).extend(laps)
            if channel is not None and (self._seen or self.alternates):
                self._hear_others(channel, last)
            due = self._samples(self._release(now, last))
        return due + self._telemetry()

    def _hold_reading(self, reading: Reading, now: float) -> None:
        """In training, what DDP's clock saw is worth a row even at a step that would have had none."""
        like = self._newest_timing
        if like is None or reading.step in self._held or reading.step in self._released:
            return
        timing = like._replace(step=reading.step, step_time_s=reading.step_time_s, input_time_s=reading.input_time_s)
        self._held[reading.step] = (SampleRow(timing, warmup=False), now)

    def _reach(self) -> Channel | None:
        """The way to the other ranks, once there is one. What is to be told waits until then."""
        if self.meeting is not None and self._guard.works("reaching the other ranks"):
            with self._guard("reaching the other ranks"):
                return self.meeting.channel()
        return None

    def _tell_leader(self, channel: Channel) -> None:
        laps, readings = _taken(self.laps), _taken(self.readings)
        if laps:
            with self._guard("telling the first rank"):
                channel.post({"laps": [[lap.step, lap.synchronised, lap.busy_time_s] for lap in laps]})
        if readings:
            with self._guard("telling the first rank"):
                columns = [
                    [r.step, r.step_time_s, r.input_time_s, r.comm_time_s, r.exposed_comm_time_s] for r in readings
                ]
                channel.post(columns)

    def _hear_others(self, channel: Channel, last: bool) -> None:
        if not self._guard.works("hearing the other ranks"):
            return
        ends = time.monotonic() + (LAST_CALL_S if last else 0.0)
        with self._guard("hearing the other ranks"):
            while True:
                for rank in range(1, channel.world_size):
                    for message in channel.collect(rank):
                        self._heard(rank, message)
                if time.monotonic() >= ends or self._heard_all(channel.world_size):
                    return
                time.sleep(0.02)

    def _heard(self, rank: int, message: Any) -> None:
        if isinstance(message, dict):
            self._laps.setdefault(rank, []).extend(Lap(*lap) for lap in message["laps"])
            return
        for step, *times in message:
            self._seen.setdefault(int(step), {})[rank] = Reading(int(step), *times)

    def _heard_all(self, world_size: int) -> bool:
        if self.alternates:
            newest = [max((lap.step for lap in laps), default=-1) for laps in self._laps.values()]
            return len(newest) == world_size and len(set(newest)) == 1
        return all(len(seen) == world_size for seen in self._seen.values())

    def _release(self, now: float, last: bool) -> list[SampleRow]:
        ready = []
        world_size = self._world_size()
        for step in [s for s in self._marked if s <= self._newest and s not in self._held]:
            self._marked.pop(step).release()  # its row was dropped
        untold = {step for step, (row, _) in self._held.items() if not self._told_by_device(row, last)}
        if self.alternates:
            return self._release_alternating(last)
        for step, (row, since) in sorted(self._held.items()):
            if step in untold:
                continue
            seen = self._seen.get(step, {})
            if len(seen) == world_size:
                self._apply(row, merge(seen))
            elif self.splits_expected and not last:
                # Its reading comes a step or two later, if this step was sampled at all.
                awaited = now - since < HOLD_S and (0 in seen or self._newest < step + 3)
                if awaited:
                    continue
            elif world_size == 1:
                row.comm_time_s = row.exposed_comm_time_s = 0.0
                row.compute_time_s = row.timing.step_time_s - row.timing.input_time_s
            del self._held[step]
            self._released.append(step)
            self._seen.pop(step, None)
            ready.append(row)
        for step in [s for s in self._seen if s < self._newest - 10_000]:
            del self._seen[step]
        return ready

    def _told_by_device(self, row: SampleRow, last: bool) -> bool:
        """False while the device has not come to the end of the step; at the very end, wall time must do."""
        interval = self._marked.get(row.timing.step)
        if interval is None:
            return True
        with self._guard("the device's clock"):
            told = interval.poll()
            if told is None and not last:
                return False
            if told is not None and told.step_time_s > 0:
                # Waits of later micro-steps are only known to the host.
                waited = told.input_time_s if row.timing.micro_steps == 1 else None
                waited = row.timing.input_time_s if waited is None else waited
                row.timing = row.timing._replace(step_time_s=told.step_time_s, input_time_s=waited)
                row.method = "cuda_events"
                if told.optimizer_time_s is not None:
                    self.rows.add_value(row.timing.step, "optimizer_time_s", told.optimizer_time_s)
        del self._marked[row.timing.step]
        return True

    def _release_alternating(self, last: bool) -> list[SampleRow]:
        """Only the whole run tells: its rows leave together, at its end."""
        if not last:
            return []
        split = split_by_alternation(self._laps) if len(self._laps) == self._world_size() else None
        rows = [row for _, (row, _) in sorted(self._held.items())]
        self._held.clear()
        for row in rows:
            if split is not None and not row.warmup:
                self._apply(row, split, "no_sync")
        return rows

    def _apply(self, row: SampleRow, split: Split, method: str = "ddp_logger") -> None:
        row.method = method
        row.compute_time_s = split.compute_time_s
        row.comm_time_s = split.comm_time_s
        row.exposed_comm_time_s = split.exposed_comm_time_s
        row.skew_s = split.skew_s
        row.straggler_rank = split.straggler_rank
        self.rows.add_value(row.timing.step, "skew_s", split.skew_s)

    def _summarise(self) -> list[Envelope]:
        """What crosses the network from a rank other than the first: memory, with its median step time."""
        if self.memory is None or not self._summary:
            return []
        newest = self._summary[-1]
        times = median(timing.step_time_s for timing in self._summary)
        return self._samples([SampleRow(newest, warmup=False, step_time_s=times)])

    def _samples(self, rows: list[SampleRow]) -> list[Envelope]:
        if not rows:
            return []
        path = routes.RUN_SAMPLES.format(run_id=self.config.run_id)
        memory, self.memory = self.memory, None
        due = []
        for body in sample_bodies(rows, self._identity(), self._sequence):
            if self.epochs_before is not None:
                body["epochs_before"] = self.epochs_before
            if memory is not None:
                body["memory"] = memory
            due.append(Envelope("POST", path, encode(body), len(body["sequence"])))
        self._sequence += len(rows)
        return due

    def _telemetry(self) -> list[Envelope]:
        chunk = telemetry_body(self.rows.take_values(), self._identity(), self._chunk)
        if chunk is None:
            return []
        self._chunk += 1
        path = routes.RUN_TELEMETRY.format(run_id=self.config.run_id)
        return [Envelope("POST", path, encode(chunk), len(chunk["steps"]))]

    def _identity(self) -> dict[str, Any]:
        return {"rank": self.config.rank, "boot_id": self._boot_id, "world_size": self._world_size()}


def _taken(queue: deque[T]) -> list[T]:
    """All that the training thread has put there so far."""
    return [queue.popleft() for _ in range(len(queue))]
