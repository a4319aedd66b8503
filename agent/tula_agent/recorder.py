"""One run in one process: the moments of the loop as the training thread lives them."""

from __future__ import annotations

import secrets
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from tula_agent.channel import Meeting, current_group, placed
from tula_agent.config import AgentConfig, ProfilePlan, is_launched
from tula_agent.forks import forget_in_children
from tula_agent.guard import Guard, logger
from tula_agent.measure.device_clock import DeviceClock, Interval, clock_for
from tula_agent.measure.gradients import GradientReader
from tula_agent.measure.later import to_number
from tula_agent.measure.memory_reports import MemoryReports, device_of
from tula_agent.measure.shards import check_shards
from tula_agent.measure.splitting import Splitting
from tula_agent.measure.step_timer import StepTimer, StepTiming, batch_size_of
from tula_agent.profiling import Profiling
from tula_agent.ship.envelope import Envelope, encode
from tula_agent.ship.exporter import Exporter
from tula_agent.ship.instruction import InstructionPoller
from tula_agent.ship.reporter import Reporter
from tula_agent.ship.transport import Reply, Transport
from tula_agent.together import Together
from tula_agent.watched import Watched
from tula_wire import routes

if TYPE_CHECKING:
    from tula_agent.measure.comm_hook import NoiseHook
    from tula_agent.scaling.thresholds import ThresholdPoller

__all__ = ["Recorder"]

TRAIN_WARMUP_STEPS = 5
EVERY_STEP_UNTIL, THEN_EVERY = 100, 5
"""Training runs send a sample of every step at first, then of every fifth, so that drift shows within 50; telemetry has
every step."""
MEMORY_EVERY_STEPS = 1000

_sessions = count()


class Recorder:
    """What is measured, and when. Its methods run on the training thread under the session's guard."""

    def __init__(
        self, config: AgentConfig, guard: Guard, dataset_size: int | None = None, grad_accum_steps: int | None = None
    ) -> None:
        self.config = config = placed(config)
        self._path = routes.RUN.format(run_id=config.run_id)
        self.dataset_size = dataset_size
        self.guard = guard
        self.leads = config.rank == 0  # the rank that speaks for the run
        self.profiling = Profiling(config.plan, self.leads, guard)
        self.finished = False
        self.boot_id = secrets.token_hex(8)
        self.watched = Watched()
        self.timer = StepTimer(grad_accum_steps or config.grad_accum_steps)
        self.reporter = Reporter(config, guard, self.boot_id, lambda: self.world_size)
        self._session = next(_sessions)
        self.memory = MemoryReports(guard, self.reporter, config.ranks_per_node)
        self._gradients = GradientReader(self.reporter.rows.add_value)
        self._splitting: Splitting | None = None
        self._noise: weakref.ref[NoiseHook] | None = None  # the model's, whose process group it knows
        self._device_clock: DeviceClock | None = None
        self._begun = False
        self._group: weakref.ref[Any] | None = None
        self._groups = 0
        self._ranks = config.world_size
        self._in_step = False
        self._batch_size: int | None = None
        self._last_step_s = 0.1
        self._instruction = InstructionPoller(self._path, self.profiling.offer) if config.plan is None else None
        self._poller: ThresholdPoller | None = None
        self.exporter = Exporter(
            self._connect,
            self.reporter.collect,
            config.spool_dir / f"{config.run_id}-{config.rank}-{self.boot_id}.spool",
            guard=guard,
            on_reply=self._on_reply,
            idle=self._idle if self.leads else None,
            flush_interval_s=config.flush_interval_s,
            queue_limit_bytes=config.queue_limit_bytes,
            spool_limit_bytes=config.spool_limit_bytes,
        )
        if self.leads:
            self._patch({"state": "running"}, keep=False)
            self.exporter.start()
        forget_in_children(self)

    @property
    def plan(self) -> ProfilePlan | None:
        """What a profiling run does; None in training."""
        return self.profiling.plan

    @property
    def stopping(self) -> bool:
        """True once a profiling run has measured enough."""
        return self.profiling.stopping

    def may_repeat(self) -> bool:
        """See `Profiling.may_repeat`."""
        repeats = not self.finished and self.profiling.may_repeat(self.timer.step)
        self.reporter.training = self.plan is None
        return repeats

    @property
    def world_size(self) -> int:
        """As the process sees it, or saw it before its group went."""
        if current_group() is not None:
            self._ranks = torch.distributed.get_world_size()
        return self._ranks

    @property
    def local_batch_size(self) -> int | None:
        """Examples per rank and micro-step as the process saw them, or was told before it saw any."""
        return self._batch_size or self.config.local_batch_size

    @property
    def dropped(self) -> int:
        """Measurements lost so far."""
        return self.reporter.rows.dropped + self.exporter.dropped

    # Moments of the loop.

    def watch(self, models: list[Any], optimizers: list[Any], scaler: Any, comm_hook: bool = False) -> None:
        """Hook the optimizers; nothing is put on the model, its communication hook stays free unless asked for.

        Models and optimizers stay the script's: see `Watched`.
        """
        del scaler  # it unscales before an optimizer's step hooks run, and a skipped step ends by counting
        self._look_at_group()
        for optimizer in self.watched.add(models, optimizers):
            if hasattr(optimizer, "apply_thresholds") and self.leads and self.config.job_id and not self._polls():
                # The script's own policy is a choice; only a user's choice for the job goes before it.
                policy = optimizer.scripted_thresholds.policy
                path = f"{routes.JOB_SCALING.format(job_id=self.config.job_id)}?policy={policy}"
                from tula_agent.scaling.thresholds import ThresholdPoller  # loaded by the optimizer already

                self._poller = ThresholdPoller(path, optimizer, self.config.run_id)
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)
                self.timer.watched = True
            else:
                logger.warning("%s has no step hooks: its gradient norm is not measured", type(optimizer).__name__)
        held = list(self.watched.models)
        if (comm_hook or self.config.comm_hook) and self._noise is None:
            with self.guard("the communication hook"):
                from tula_agent.measure.comm_hook import attach  # brings much of scaling: only where it is wanted

                hook = attach(held, self.leads, lambda: self.timer.step, lambda: self.timer.examples)
                self._noise = None if hook is None else weakref.ref(hook)
        self._count_memory(held)
        if self._begun and models and self.reporter.meeting is not None:
            self._split(held)

    def _polls(self) -> bool:
        return self._poller is not None and self._poller.wanted

    def _count_memory(self, models: list[torch.nn.Module]) -> None:
        if self.timer.step == 0:
            self.memory.probe.before_training(models)
        else:
            self.memory.probe.before_more_training(models)

    def _look_at_group(self) -> None:
        """A second process group, made after the first was destroyed, is begun in as the first was."""
        group = current_group()
        known = None if self._group is None else self._group()
        if group is None or group is known:
            return
        if self._group is not None:
            self.watched.forget()
            self._splitting = self._noise = None
            self._gradients = GradientReader(self.reporter.rows.add_value)
        self._begun = False
        self._group = weakref.ref(group)
        self._groups += 1
        self.config = self.reporter.config = placed(self.config)
        self.leads = self.profiling.leads = self.config.rank == 0

    def begin_epoch(self, loader: Any) -> None:
        """The loop starts over its loader."""
        self._look_at_group()
        if not self._begun:
            self._begun = True
            self._first_epoch()
            if self.leads:
                check_shards(loader, self.dataset_size, self.world_size)
        for optimizer in self.watched.optimizers:
            if hasattr(optimizer, "next_epoch"):
                optimizer.next_epoch()
        self.exporter.start()

    def _first_epoch(self) -> None:
        models = list(self.watched.models)
        self._count_memory(models)
        if current_group() is None and not is_launched():
            self._ranks = 1
        world_size = self.world_size
        self.profiling.join(Together(None, self.guard, world_size))
        if world_size > 1 and current_group() is not None:
            with self.guard("finding the other ranks"):
                self.reporter.meeting = Meeting(self.config, f"{self._session}.{self._groups}")
                self.profiling.join(Together(self.reporter.meeting, self.guard, world_size))
                self._split(models)
        if self.leads and self._device_clock is None:
            with self.guard("the device's clock"):
                self._device_clock = clock_for(device_of(models))

    def _split(self, models: list[torch.nn.Module]) -> None:
        if self._splitting is not None:
            self._splitting.end()
        self._splitting = Splitting(
            models,
            self.reporter,
            profiling=self.plan is not None,
            alternate=self.config.alternate_sync,
            grad_accum_steps=self.timer.grad_accum_steps,
        )

    def want_batch(self) -> None:
        """The boundary between two micro-steps."""
        if self.finished:
            return
        self._in_step = False
        under_way = self.timer.step
        timing = self.timer.want_batch()
        clock = self._device_clock
        interval = clock.end() if clock is not None and timing is not None else None
        if self._splitting is not None and self.guard.works("DDP's clock"):
            with self.guard("DDP's clock"):
                self._splitting.boundary(under_way, timing)
        if timing is not None:
            self._last_step_s = timing.step_time_s
            if self._step_ended(timing, interval):
                self.timer.restart()
        if clock is not None and self.timer.between_steps and self._samples(self.timer.step):
            clock.begin()

    def batch_ready(self, batch: Any, loader: Any) -> None:
        """A batch has arrived."""
        if self.finished:
            return
        size = batch_size_of(batch, loader)
        self.timer.batch_ready(size)
        if self._device_clock is not None:
            self._device_clock.batch()
        self._in_step = True
        if self._batch_size is None and size is not None:
            self._first_batch(size)
        if size is not None and size > self.memory.largest_seen:
            self.memory.saw_batch(size, batch, loader)
        if self.watched.observers.references:
            self.watched.show(batch)

    def end_epoch(self) -> None:
        """The loop is left."""
        self._in_step = False
        self.timer.pause()
        if self._device_clock is not None:
            self._device_clock.drop()
        if self.timer.step and not self.memory.read_once and not self.finished:
            self._read_memory()  # a short run: its model may not live to see the end

    def log(self, values: dict[str, Any]) -> None:
        """Named numbers of the step under way, or of the last one between steps; only the first rank's are sent."""
        if not self.leads or self.finished:
            return
        step = self.timer.step if self._in_step else max(0, self.timer.step - 1)
        for name, value in values.items():
            if value is not None:
                self.reporter.rows.add_value(step, name, to_number(value))

    def finish(self, state: str, message: str | None = None, failed_local_batch_size: int | None = None) -> None:
        """Say how the run ended and deliver what is left."""
        self.finished = True
        if self.timer.step:
            self._read_memory()
        self._let_go()
        self.exporter.close(self.config.exit_deadline_s, self._last_words(state, message, failed_local_batch_size))
        self.reporter.meeting = None
        self.profiling.join(Together(None, self.guard))
        if self.dropped:
            logger.warning("%d measurements were dropped", self.dropped)

    def _let_go(self) -> None:
        """Hold nothing of the job any more: a model that lives into the interpreter's end can abort it (gloo).

        Hooks stay and do nothing: the look-out's thread may be here while an optimizer goes through its hooks, and
        taking one away then raises in the job.
        """
        if self._splitting is not None:
            self._splitting.end()
        self.watched.forget()
        self._splitting = self._noise = self._device_clock = self._poller = None
        self._gradients = GradientReader(self.reporter.rows.add_value)

    def _last_words(self, state: str, message: str | None, failed_local_batch_size: int | None) -> list[Envelope]:
        if not self.leads and state != "out_of_memory":
            return []
        body = {"state": state, "message": message, "dropped": self.dropped}
        if state == "out_of_memory":
            body["failed_local_batch_size"] = failed_local_batch_size or self._batch_size
        told = {name: value for name, value in body.items() if value is not None}
        return [Envelope("PATCH", self._path, encode(told))]

    # Inside the moments.

    def _first_batch(self, size: int) -> None:
        self._batch_size = size
        told = self.config.local_batch_size
        if told is not None and told != size:
            logger.warning("the script uses batches of %d per rank but was told %d: pass it on", size, told)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        if self.finished:
            return
        try:
            self.timer.optimizer_stepped()
            if self._device_clock is not None:
                self._device_clock.optimizer()
            step = self.timer.step
            if step == 1:
                self.memory.probe.at_optimizer(list(self.watched.models))
            if not self.leads or step < self._gradients.due or not self.guard.works("gradients"):
                return
            if optimizer is self.watched.optimizers.first:
                self._gradients.read(step, self._last_step_s, self.watched.models, optimizer)
        except Exception as error:  # the guard's work, inlined: this runs every step
            self.guard.note("gradients", error)

    def _samples(self, step: int) -> bool:
        """True when a step of this number is worth a row."""
        return self.profiling.plan is not None or step < EVERY_STEP_UNTIL or step % THEN_EVERY == 0

    def _step_ended(self, timing: StepTiming, interval: Interval | None) -> bool:
        """Record a step; True when that took so long that the next step's clock should start anew."""
        step, plan = timing.step, self.profiling.plan
        warmup_steps = TRAIN_WARMUP_STEPS if plan is None else plan.warmup_steps
        # A last, smaller batch is another configuration's measurement.
        usual = timing.local_batch_size == self._batch_size and not timing.uneven
        if self._splitting is not None and step >= warmup_steps:
            usual = self._splitting.synchronised(timing) and usual
        sampled = usual and self._samples(step)
        if interval is not None:
            self.reporter.marked(step, interval) if sampled else interval.release()
        self.reporter.rows.add_step(timing, step < warmup_steps, sampled)
        hook = None if self._noise is None else self._noise()
        if hook is not None and (noise_scale := hook.news()) is not None:
            # A TulaOptimizer that says the same of more measurements, below, has the last word.
            self.reporter.rows.add_value(step, "gradient_noise_scale", noise_scale)
        if self.leads and self.watched.tellers.references:
            for name, value in self.watched.news():
                self.reporter.rows.add_value(step, name, value)
        read = step == max(2, warmup_steps) or (step > 0 and step % MEMORY_EVERY_STEPS == 0)
        if read:
            self._read_memory()
        if step < warmup_steps:
            return read
        if self.profiling.unsettled:
            self.profiling.settle(step)
            plan = self.profiling.plan
            self.reporter.training = plan is None
            read = True
        if plan is not None and self.profiling.ends(step, timing.step_time_s if usual else None):
            if self._splitting is not None:
                self._splitting.end()
            self._read_memory()
            self.exporter.wake()
        return read or plan is not None

    def _read_memory(self) -> None:
        last = max(0, self.timer.step - 1)
        self.memory.read(last, list(self.watched.models), list(self.watched.optimizers))

    # On the shipping thread.

    def _connect(self) -> Transport:
        return Transport(self.config.url, self.config.token, self.config.request_timeout_s)

    def _patch(self, body: dict[str, Any], keep: bool = True) -> None:
        self.exporter.put(Envelope("PATCH", self._path, encode(body), 0, keep))

    def _idle(self, transport: Transport) -> None:
        for poller in (self._instruction, self._poller):
            if poller is not None:
                poller.poll(transport)

    def _on_reply(self, envelope: Envelope, reply: Reply) -> None:
        if envelope.method == "POST" and reply.body and reply.body.get("stop") is True:
            self.profiling.stop_soon()
