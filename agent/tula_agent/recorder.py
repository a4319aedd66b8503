"""Decides what a run measures and when, and connects `measure/` to `ship/` on the training thread."""

from __future__ import annotations

import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tula_agent.batches import BatchSizes, infer_batch_size, infer_sequence_length, stated_batch_size
from tula_agent.config import AgentConfig, ProfilePlan, is_launched, keep_children_out
from tula_agent.guard import Guard, logger
from tula_agent.launch import Launch
from tula_agent.measure.cores import own_cores
from tula_agent.measure.ddp import BucketTimer, CommSplit
from tula_agent.measure.energy import EnergyMeter
from tula_agent.measure.gradients import GradientReader
from tula_agent.measure.launches import OperationCounter, node_time_s
from tula_agent.measure.memory import MemoryMonitor, device_use, find_device
from tula_agent.measure.step_timer import DeviceClock, StepTimer, clock_for
from tula_agent.measure.switches import SwitchWatch, contradictions
from tula_agent.profiling import Profiling, StopAgreement
from tula_agent.rank_channel import Channel, RankRendezvous, current_group, with_group_place
from tula_agent.readings import Interval, Readings, StepTiming, beside_captures, to_number
from tula_agent.ship.exporter import Exporter
from tula_agent.ship.joining import Joining
from tula_agent.ship.kubeflow import TrainJobStatus
from tula_agent.ship.request_builder import Identity, RequestBuilder
from tula_agent.ship.spool import SpooledRequest, encode
from tula_agent.ship.transport import Reply, Transport
from tula_agent.torch_private import ddp_models, default_store
from tula_wire import routes

if TYPE_CHECKING:
    from tula_agent.scaling.pull import ServedNumbers

EVERY_STEP_UNTIL, THEN_EVERY = 100, 5
"""Training runs send a sample of every step at first, then of every fifth, so a drift is noticed within 100 steps.

Telemetry includes every step.
"""
MEMORY_EVERY_STEPS = 1000
COUNTED_STEP = 1
"""Step whose operations are counted: the first step that resembles all later steps, and in most runs a warm-up step."""
BUCKETS_TIMED_FROM = 2
"""Number of steps in a launch before DDP's buckets are timed, since DDP orders its buckets in the first step.

At later batch sizes, buckets are timed from the first step on: the hooks on every parameter slow a step down, and these
batch sizes have fewer warm-up steps.
"""
SWITCHES_SEEN_AFTER = 1
"""Step after which hooks observe the script's switches during one step; by then, compilation has finished."""
WATCHED_KNOWN_STEP, UNWATCHED_KNOWN_STEP = 2, 24
"""Steps after which accumulation is known, for watched optimizers and for optimizers whose calls are only counted."""
REQUEST_TIMEOUT_S = 5.0
_FEW_OPTIMIZERS = 8
"""Maximum number of optimizers to time; scripts with more have one per parameter, used during the backward pass."""
_LASTING = 3
"""Number of consecutive steps with an unusual batch size that rule out the end of an epoch as the cause."""

_recorders = count()


class TrackedObjects:
    """Models and optimizers from all calls of `run.watch`, in order, for as long as the script keeps them.

    References are weak, because a strong reference to a model would keep its process group open. scaled: the optimizers
    that scale gradients (`TulaOptimizer`) and must observe each batch, with the values that each of them reported last.
    """

    def __init__(self) -> None:
        self.models: WeakKeyDictionary[torch.nn.Module, None] = WeakKeyDictionary()
        self.optimizers: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        self.scaled: WeakKeyDictionary[Any, dict[str, float]] = WeakKeyDictionary()
        self.scales = False  # saves a call in the hot path

    def add(self, models: Iterable[Any], optimizers: Iterable[Any]) -> list[Any]:
        """Track models and optimizers; return the new optimizers."""
        self.models.update((model, None) for model in models if isinstance(model, torch.nn.Module))
        new = []
        for optimizer in optimizers:
            try:
                if optimizer in self.optimizers:
                    continue
                self.optimizers[optimizer] = None
                if hasattr(optimizer, "observe_batch"):
                    self.scaled[optimizer], self.scales = {}, True
            except TypeError:  # a wrapper in the script that has slots or defines equality
                logger.warning("%s cannot be a dictionary key, so its state is not measured", type(optimizer).__name__)
            new.append(optimizer)
        return new

    def changed_values(self) -> Iterator[tuple[str, float]]:
        """Yield the name and value of each reported number that has changed; names of the second optimizer end in `_2`.

        A script may have several optimizers, such as one per network. If they shared a column, only the values of the
        last optimizer would remain.
        """
        for number, (optimizer, reported) in enumerate(self.scaled.items(), 1):
            for name, value in optimizer.telemetry().items():
                if reported.get(name) != value and name != "step":
                    reported[name] = value
                    yield name if number == 1 else f"{name}_{number}", value

    def observe_batch(self, batch: Any, size: float | None, share: float, times: int) -> None:
        """Pass a batch (a `share` of the loader's batch) to the scaling optimizers, once for each of `times`
        micro-steps.

        size: the number of examples if the batch itself shows a different number, or None.
        """
        for optimizer in self.scaled:
            for _ in range(times):
                optimizer.observe_batch(batch, size=size, share=share)


class Recorder:
    """Records one run in one process. Its methods are called on the training thread, under the run's guard.

    Three methods run at least once per step: `want_batch`, `batch_ready` and `before_optimizer_step`. None of these
    methods takes a lock or waits; torch calls `before_optimizer_step`, which never raises.
    """

    # Each step reads these attributes, mostly with cold caches; a dictionary would make this take a tenth longer.
    __slots__ = (
        "__dict__", "__weakref__", "_batch_size", "_bucket_timer", "_comm_split", "_device_clock", "_last_step_s",
        "_other_sizes", "_quiet_until", "_sizes_vary", "_unclocked_step", "config", "energy", "finished", "gradients",
        "guard", "launch", "leads", "memory", "objects", "profiling", "readings", "sizes", "timer",
    )  # fmt: skip

    def __init__(
        self,
        config: AgentConfig,
        guard: Guard,
        grad_accum_steps: int | None = None,
        model_parallel_size: int = 1,
        batch_size: float | None = None,
    ) -> None:
        self.config = config = with_group_place(config)
        self.sizes = BatchSizes(batch_size)
        self.ends_for_smaller: Callable[[int, int], bool] | None = None  # see `Run._ends_for_smaller`
        self.model_parallel_size = max(1, model_parallel_size)
        self.guard = guard
        self.leads = config.rank == 0  # True: this rank reports for the run
        self.finished = False
        self.boot_id = secrets.token_hex(8)
        self.launch = Launch(config.run_id, config.local_batch_size, config.plan.smaller_batches if config.plan else ())
        self.profiling = Profiling(config.plan, self.launch, guard)
        self.readings = Readings(config.row_limit)
        self.objects = TrackedObjects()
        self.timer = StepTimer(grad_accum_steps or config.grad_accum_steps)
        self.memory = MemoryMonitor(config.ranks_per_node)
        self.energy = EnergyMeter()
        self.gradients = GradientReader()
        self.requests = RequestBuilder(
            self.readings,
            self.launch,
            guard=guard,
            identity=lambda: Identity(self.config.rank, self.boot_id, self.world_size),
            channel=self.channel,
            is_training=lambda: self.plan is None,
            device_use=lambda: device_use(self.memory.device),
            model_parallel_size=self.model_parallel_size,
        )
        self._number = next(_recorders)
        self._comm_split: CommSplit | None = None
        self._bucket_timer: BucketTimer | None = None
        self._operations: OperationCounter | None = None
        self._optimizer_calls: count[int] | None = None  # calls of all optimizers if none is watched
        self._counting: Any = None
        self._device_clock: DeviceClock | None = None
        self._rendezvous: RankRendezvous | None = None
        self._group: weakref.ref[Any] | None = None
        self._groups = 0
        self._begun = False  # True: training has begun in the current process group
        self._last_world_size = config.world_size
        self._on_host = False  # True: the host times the optimizer, whose step on a device only launches work
        self._times_optimizer = True  # True: the optimizer steps after the backward pass, not during it
        self._paused = False
        self._unclocked_step: int | None = None
        self._batch_size: int | None = None
        self._sizes_vary = self._said_sizes = self._said_rise = False
        self._other_sizes: deque[int] = deque(maxlen=_LASTING)  # of consecutive steps
        self._last_step_s = 0.1
        self._repeats = False  # True: a profiling run repeats its loader
        self._switch_watch: SwitchWatch | None = None
        self._quiet_until = 0  # steps before this one are recorded, and no other task is due
        self._served_numbers: ServedNumbers | None = None
        self._trainjob = TrainJobStatus.from_environment(os.environ, lambda: self.requests.newest_values)
        self.joining = None
        if config.job is not None:
            self.joining = Joining(self, config.job, self._number, guard)
        self.exporter = Exporter(
            lambda: Transport(config.url, config.token, REQUEST_TIMEOUT_S),
            self._collect,
            config.spool_dir / f"{config.run_id}-{config.rank}-{self.boot_id}.spool",
            guard=guard,
            lease=config.lease,
            on_reply=self._on_reply,
            poll=self._poll if self.leads else None,
        )
        if self.leads:
            if self.joining is None:
                self._report("running", config.run_id)
            self.exporter.start()
        reference = weakref.WeakMethod(self._finish_in_child)
        os.register_at_fork(after_in_child=lambda: (method := reference()) and method())

    @property
    def plan(self) -> ProfilePlan | None:
        """Return the plan of a profiling run, or None in a training run."""
        return self.profiling.plan

    @property
    def stopping(self) -> bool:
        """Return True once a profiling run has measured enough."""
        return self.profiling.stopping

    @property
    def world_size(self) -> int:
        """Return the size of the current or last default process group, or the environment's world size if there was
        none.
        """
        if current_group() is not None:
            self._last_world_size = torch.distributed.get_world_size()
        return self._last_world_size

    @property
    def local_batch_size(self) -> int | None:
        """Return the measured number of examples per rank and micro-step; before the first batch, the configured
        number.
        """
        return self._batch_size or self.local_configured

    @property
    def local_configured(self) -> int | None:
        """Return the number of examples per rank and micro-step that the run should use now."""
        return self.launch.cut_to or self.config.local_batch_size

    @property
    def dropped(self) -> int:
        """Return the number of measurements lost so far."""
        return self.readings.dropped + self.exporter.dropped

    def channel(self, within_s: float = 0.0) -> Channel | None:
        """Return the connection to the other ranks, or None if there is none; wait `within_s` seconds at most."""
        rendezvous = self._rendezvous
        return None if rendezvous is None else rendezvous.channel(within_s)

    def begin_at(self, epochs_before: float, known: bool) -> None:
        """Begin a loop after `epochs_before` epochs; `known` is False if the script does not report this number.

        A restarted script that does not report the number may have loaded any checkpoint, so the number is then
        unknown.
        """
        self.readings.epochs_before = epochs_before if known or not self.config.restarted else None

    def may_repeat(self) -> bool:
        """Return True if a profiling run may repeat its loader to measure more steps; all ranks get the same result."""
        repeats = not self.finished and self.profiling.may_repeat()
        self._follow_first_rank()
        self._repeats = self._repeats or repeats
        return repeats

    def cut(self, batch: Any, loader: Any) -> Any:
        """Return the part of `batch` that the script receives while a smaller batch size is measured. Never raises.

        A batch that can't be cut is returned whole. If the first batch can't be cut, the launch measures only the whole
        batch.
        """
        if self.launch.cut_to is None or self.finished:
            return batch
        first = self.timer.step == 0
        try:
            cut = self.launch.cut(batch, self.sizes.of(batch, loader), first)
        except Exception as error:
            if first:
                self.measure_whole_batches(f"the batch can't be cut ({error})")
            else:
                self.guard.note("cutting a batch", error)
            return batch
        if self._batch_size is None and self.leads:
            self._report("running", self.launch.run_id)
        return cut

    def measure_whole_batches(self, because: str) -> None:
        """Pass whole batches to the script from now on; later launches can measure the smaller ones."""
        if self.launch.cut_to is not None:
            logger.warning("this launch measures one batch size instead of several, because %s", because)
            self.profiling.drop_smaller_batches()
            self._follow_first_rank()

    def measure_alone(self, because: str) -> None:
        """Measure this rank's steps without agreeing with the other ranks on when to stop.

        Only the first rank may end the measurement. If another rank ended it, the first rank could wait in a step while
        that rank sends its data.
        """
        self.measure_whole_batches(because)
        self.profiling.measure_alone(ends=self.leads)

    def watch(self, models: list[Any], optimizers: list[Any]) -> None:
        """Add hooks to the optimizers, and keep weak references to them and to the models.

        Models do not get permanent hooks, and DDP's communication hook is not used.
        """
        self._check_group()
        for optimizer in self.objects.add(models, optimizers):
            self._pull_numbers(optimizer)
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self.before_optimizer_step)
                self.timer.watched = True
            else:
                logger.warning("%s has no step hooks, so its gradient norm is not measured", type(optimizer).__name__)
        self._times_optimizer = len(self.objects.optimizers) <= _FEW_OPTIMIZERS
        tracked = list(self.objects.models)
        self._on_host = find_device(tracked).type == "cpu"
        self.memory.before_training(tracked, first=self.timer.step == 0)
        if self._begun and models and self._rendezvous is not None:
            self._start_comm_split(tracked)

    def begin_epoch(self) -> None:
        """Begin an epoch when the script begins to iterate over its loader."""
        self._check_group()
        if not self._begun:
            self._begun = True
            keep_children_out(self.config)
            self._begin_in_group()
            if self.leads and self.timer.step == 0 and not self.timer.watched:
                counter = self._optimizer_calls = count()

                def stepped(*_: Any) -> None:
                    next(counter)

                self._counting = register_optimizer_step_post_hook(stepped)
        for optimizer in self.objects.scaled:
            optimizer.next_epoch()
        self.exporter.start()

    def want_batch(self) -> None:
        """End a micro-step when the script requests the next batch."""
        if self.finished:
            return
        step = self.timer.step
        timing = self.timer.want_batch()
        clock = self._device_clock
        interval = clock.end() if clock is not None and timing is not None else None
        if self._comm_split is not None and self.guard.works("DDP's clock"):
            with self.guard("DDP's clock"):
                comm = self._comm_split.at_boundary(step, timing)
                if comm is not None:
                    self.readings.comm.append(comm)
        if timing is not None:
            self._last_step_s = timing.step_time_s
            if self._step_ended(timing, interval):
                self.timer.restart()
        if clock is not None and self.timer.between_steps and self._is_sampled(self.timer.step):
            clock.begin()

    def batch_ready(self, batch: Any, loader: Any, micro_steps: int = 1) -> None:
        """Begin `micro_steps` micro-steps of the same size when a batch arrives."""
        if self.finished:
            return
        # A cut batch does not have the size that its loader states.
        size = counted = self.sizes.of(batch, loader if self.launch.cut_to is None else None)
        if size is None:
            size = self.config.local_batch_size
            self._say_that_sizes_are_unknown("a batch does not show how many examples it contains")
        self.timer.batch_ready(size)
        if micro_steps > 1:
            self.timer.more_micro_steps(micro_steps - 1)
        if self._device_clock is not None:
            self._device_clock.batch()
        if self._bucket_timer is not None:
            self._bucket_timer.begin()
        if self._batch_size is None and size is not None:
            self._first_size(size, loader)
        if size is not None and size > self.memory.largest_seen:
            self.memory.saw_batch(size, batch, loader)
        if self.objects.scales and counted is not None:  # an unknown size must not set a learning rate
            own = None if counted == infer_batch_size(batch) else float(counted)
            self.objects.observe_batch(batch, own, self.launch.batch_share(self.launch.cut_to), micro_steps)
        early = self.leads and self.timer.step < EVERY_STEP_UNTIL
        if early and (length := infer_sequence_length(batch)) is not None:
            self.readings.add_value(self.timer.step, "tokens_per_example", float(length))

    def _first_size(self, size: int, loader: Any) -> None:
        self._batch_size = size
        planned = self.config.local_batch_size if self.plan is not None and self.launch.cut_to is None else None
        if planned is not None and size < planned and self.ends_for_smaller and self.ends_for_smaller(size, planned):
            return
        self.uses_workers(getattr(loader, "num_workers", None))
        configured = self.local_configured
        states = self.sizes.given is not None or stated_batch_size(loader) is not None
        if configured is not None and configured != size and (states or self.launch.cut_to):
            text = "the script uses a batch size of %d per rank, but the run requires %d: use the run's batch size"
            logger.warning(text, size, configured)

    def uses_workers(self, loader_workers: Any) -> None:
        """Record the number of worker processes of the training loader; None if the loader is not a DataLoader."""
        if type(loader_workers) is int:
            self.readings.host.setdefault("loader_workers", loader_workers)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run as a pre-hook before each step of a watched optimizer; never raise."""
        if self.finished:
            return
        try:
            # With a closure, forward and backward run inside the optimizer's step. `args` begins with the optimizer.
            alone = (args[1] if len(args) > 1 else kwargs.get("closure")) is None
            alone = alone and self._times_optimizer
            if self._device_clock is not None and alone:
                self._device_clock.optimizer()
            step = self.timer.step
            if step >= self.gradients.due or step == 1:
                self._read_gradients(optimizer, step)
            self.timer.optimizer_stepped(timed=alone and self.leads and self._on_host)
        except Exception as error:
            self.guard.note("the optimizer's hooks", error)

    def _read_gradients(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        try:
            if step == 1:
                self.memory.at_optimizer(list(self.objects.models))
            if not self.leads or step < self.gradients.due or not self.guard.works("gradients"):
                return
            if self._device_clock is not None and self._device_clock.capturing():
                return  # a copy to the host cannot be part of a CUDA graph
            first = optimizer is next(iter(self.objects.optimizers), None)
            if first and "grad_norm" not in self.objects.scaled.get(optimizer, ()):  # unless it reports the norm itself
                for name, value in self.gradients.read(step, self._last_step_s, self.objects.models, optimizer):
                    self.readings.add_value(step, name, value)
        except Exception as error:
            self.guard.note("gradients", error)

    def end_epoch(self) -> None:
        """End the epoch when the script leaves its loop."""
        self.timer.pause()
        if self._device_clock is not None:
            self._device_clock.drop()
        if self.timer.step and self.memory.device is None and not self.finished:
            self._read_memory()  # in a short run, the model may be freed before the end

    def pause(self) -> bool:
        """Stop counting time until `unpause` is called; return False if time is not being counted."""
        if self.finished or self._paused:
            return False
        self._paused = True
        self.timer.leave_out()
        if self._device_clock is not None:
            self._device_clock.drop()
            # Only the host's time of the current step remains, and the host may run ahead of the device.
            self._unclocked_step = None if self.timer.between_steps else self.timer.step
        return True

    def unpause(self) -> None:
        """Resume counting time."""
        self._paused = False
        self.timer.count_again()
        if self._device_clock is not None and self.timer.between_steps and self._is_sampled(self.timer.step):
            self._device_clock.begin()

    def log(self, values: dict[str, Any]) -> int | None:
        """Log named values of the current step or, between steps, of the last step; only the first rank sends values.

        Returns the number of the step, or None if nothing is sent.
        """
        if not self.leads or self.finished:
            return None
        step = max(0, self.timer.step - 1) if self.timer.between_steps else self.timer.step
        for name, value in values.items():
            if value is not None:
                self.readings.add_value(step, name, to_number(value))
        return step

    def finish(self, state: str, message: str | None = None, failed_local_batch_size: int | None = None) -> None:
        """Report how the run ended, send the remaining measurements, and drop every reference to the script's objects.

        With gloo, a model that still exists when the interpreter shuts down can abort the process. Optimizer hooks
        remain but do nothing, because the out-of-memory watch may call this method while an optimizer iterates over its
        hooks, and removing a hook would then raise.
        """
        self.finished = True
        if self.timer.step:
            self._read_memory()
        self._forget_objects()
        self._device_clock = self._served_numbers = None
        self.exporter.close(
            self.config.exit_deadline_s, lambda: self._end_report(state, message, failed_local_batch_size)
        )
        self._rendezvous = None
        self.profiling.use(StopAgreement(None, self.guard))
        if self.dropped:
            logger.warning("%d measurements were dropped", self.dropped)

    def _finish_in_child(self) -> None:
        """Stop measuring in a forked child, such as a data-loading process; the parent sends queued measurements."""
        self.finished = True

    # Process groups.

    def _check_group(self) -> None:
        """Start again if a new process group was created after the first one was destroyed."""
        group = current_group()
        current = None if self._group is None else self._group()
        if group is None or group is current:
            return
        if self._group is not None:
            self._forget_objects()
        self._begun = False
        self._group = weakref.ref(group)
        self._groups += 1
        self.config = with_group_place(self.config)
        self.leads = self.config.rank == 0

    def _begin_in_group(self) -> None:
        self._quiet_until = 0
        models = list(self.objects.models)
        self._on_host = find_device(models).type == "cpu"  # the model may have moved since it was watched
        self.memory.before_training(models, first=self.timer.step == 0)
        if current_group() is None and not is_launched():
            self._last_world_size = 1
        world_size = self.world_size
        planned, replicas = self.config.planned_ranks, world_size // self.model_parallel_size
        if self.leads and planned is not None and planned != replicas:
            text = "the run requires %d rank(s), but %d are training: check the launch command"
            logger.warning(text, planned, replicas)
        self._rendezvous = None
        if world_size > 1 and current_group() is not None:
            with self.guard("finding the other ranks"):
                # The last part differs for each group that this process has trained in.
                prefix = f"tula/{self.config.run_id}/{self.config.restart}/{self._number}.{self._groups}/"
                self._rendezvous = RankRendezvous(default_store(), prefix, self.config.rank, world_size)
                self._start_comm_split(models)
        self.profiling.use(StopAgreement(self._rendezvous, self.guard, world_size))
        if self.leads and self._device_clock is None:
            with self.guard("the device's clock"):
                self._device_clock = clock_for(find_device(models))

    def _start_comm_split(self, models: list[torch.nn.Module]) -> None:
        split = CommSplit(models, profiling=self.plan is not None)
        self._comm_split = split if split.usable else None
        self.readings.expects_comm = self.readings.expects_comm or split.usable

    def _time_buckets(self, local_batch_size: int | None) -> None:
        """Start or stop timing the buckets of the DDP module; do nothing unless there is exactly one DDP module."""
        if not self.guard.works("timing buckets"):
            self._bucket_timer = None
            return
        with self.guard("timing buckets"):
            models = ddp_models(self.objects.models)
            if self._bucket_timer is None:
                self._bucket_timer = BucketTimer(models[0]) if len(models) == 1 else None
            elif (timeline := self._bucket_timer.end()) is not None:
                self._bucket_timer = None
                if timeline:
                    self.readings.timelines[local_batch_size] = timeline

    def _stop_timing_buckets(self) -> None:
        if self._bucket_timer is not None:
            self._bucket_timer.close()
            self._bucket_timer = None

    def _forget_objects(self) -> None:
        self.objects = TrackedObjects()
        self._comm_split = None
        self._stop_timing_buckets()
        if self._operations is not None:
            self._operations.end()
            self._operations = None
        self.gradients = GradientReader()

    # The end of a step.

    def _step_ended(self, timing: StepTiming, interval: Interval | None) -> bool:
        """Record a step; return True if recording it took so long that the next step's clock must restart."""
        step, quiet = timing.step, timing.step < self._quiet_until
        warmup = not quiet and step < self.launch.first_step + self.profiling.warmup_steps
        if self.leads and not quiet and (self._bucket_timer is not None or step == BUCKETS_TIMED_FROM):
            self._time_buckets(timing.local_batch_size)
        if timing.local_batch_size != self._batch_size or self._sizes_vary:
            timing = self._of_another_size(timing)
        elif self._other_sizes:
            self._other_sizes.clear()
        # An epoch's last step may have a smaller batch or fewer micro-steps, which is a different configuration.
        as_planned = (timing.local_batch_size, timing.micro_steps) == (self._batch_size, self.timer.grad_accum_steps)
        usual = as_planned and not timing.uneven and step != self._unclocked_step
        sampled = usual and self._is_sampled(step)
        if usual:
            self.energy.add_step(timing.step_time_s)
        if interval is not None:
            self.readings.device.append((step, interval)) if sampled else interval.release()
        self.readings.add_step(timing if usual else timing._replace(uneven=True), warmup, sampled)
        if self.leads and self.objects.scales:
            for name, value in self.objects.changed_values():
                # A cut batch gives a wrong noise scale, since the optimizer treats it as the whole batch.
                if not name.startswith("gradient_noise_scale") or self.launch.cut_to is None:
                    self.readings.add_value(step, name, value)
        return not quiet and self._do_what_is_due(step, warmup, timing.step_time_s if usual else None)

    def _of_another_size(self, timing: StepTiming) -> StepTiming:
        """Return the timing to record for a step with an unusual batch size.

        Three consecutive steps with unusual sizes cannot be the end of an epoch. If they have the same size, this size
        becomes the usual one. Otherwise, the sizes vary, and each step is recorded with the configured batch size, or
        with the mean if none is configured.
        """
        self._other_sizes.append(timing.local_batch_size or 0)
        if not self._sizes_vary and len(self._other_sizes) >= _LASTING:
            if len(set(self._other_sizes)) == 1:
                self._batch_size = self._other_sizes[0]
            else:
                mean = round(sum(self._other_sizes) / len(self._other_sizes))
                self._sizes_vary, self._batch_size = True, self.local_configured or mean
                least, most = min(self._other_sizes), max(self._other_sizes)
                self._say_that_sizes_are_unknown(f"the batch size varies (from {least} to {most}, mean {mean})")
        return timing._replace(local_batch_size=self._batch_size, uneven=False) if self._sizes_vary else timing

    def _say_that_sizes_are_unknown(self, what: str) -> None:
        if self.leads and not self._said_sizes:
            self._said_sizes = True
            size = self._batch_size or self.local_configured
            counted = f" (the run's size of {size} is assumed)" if size else ""
            remedy = (
                "state the number of examples or tokens in a batch with run.steps(loader, size=...), where size is a "
                "number or a function of the batch"
            )
            logger.warning("%s%s; %s, or with tula_agent.init(batch_size=...)", what, counted, remedy)

    def _do_what_is_due(self, step: int, warmup: bool, step_time_s: float | None) -> bool:
        """Do the tasks that are due after this step, and plan the next ones; return True if they took long."""
        since, profiling = step - self.launch.first_step, self.profiling
        if self.leads and step <= COUNTED_STEP:
            self._count_operations(step)
        took_long = since == max(2, profiling.warmup_steps) or (step > 0 and step % MEMORY_EVERY_STEPS == 0)
        if took_long:
            self._read_memory()
        if self.leads and profiling.plan is not None and self.config.options:
            self._look_at_switches(step)  # before `_read_host` completes the facts that are sent
        if since == max(2, profiling.warmup_steps):
            self.energy.begin(self._batch_size, self.memory.device)
            self._read_host()
        if step in (WATCHED_KNOWN_STEP, UNWATCHED_KNOWN_STEP):
            self._check_accumulation(step)
        if self.leads and profiling.plan is not None:
            self._say_what_changes(step, warmup)
        if not warmup:
            took_long = self._profile(step, step_time_s) or took_long
        begins = step < UNWATCHED_KNOWN_STEP or profiling.pending or self._bucket_timer is not None
        if not begins and profiling.plan is None:
            self._quiet_until = step - step % MEMORY_EVERY_STEPS + MEMORY_EVERY_STEPS
        return took_long

    def _profile(self, step: int, step_time_s: float | None) -> bool:
        """Complete pending agreements between ranks, and count a measured step; return True if this took long."""
        pending = self.profiling.pending
        if pending:
            self.profiling.agree()
            self._follow_first_rank()
            if self.profiling.probe_s > 0.0 and self.world_size > 1 and current_group() is not None:
                with self.guard("probing the links between ranks"):  # all ranks are between two steps
                    from tula_agent.measure.all_reduces import time_all_reduces  # most runs do not need this module

                    reading = time_all_reduces(find_device(self.objects.models), self.profiling.probe_s)
                    self.readings.all_reduces = reading if self.leads else None
        if self.plan is None:
            return pending
        if self.profiling.ends(step, step_time_s, self.launch.run_id):
            self._read_memory()
            if self.launch.cut_to is not None:
                self._next_batch(step)
                self.exporter.wake()
            else:
                self._end_measuring()
        return True

    def measured_enough(self) -> bool:
        """Return True if a profiling run has measured enough, or cannot measure more.

        This method is called after an exception. Repeating the loader may cause an exception, for example in a
        learning-rate schedule for the script's own number of steps; in this case, the run cannot measure more.
        """
        if self._repeats and self.profiling.timed_steps and not self.stopping:
            self.profiling.stopping = True
            self._end_measuring()
        return self.plan is not None and self.stopping

    def _end_measuring(self) -> None:
        """Send all measurements before requesting the end of the script, since the script may end in any way."""
        self.launch.measured.append((self._batch_size or 0, self.launch.run_id))
        self.exporter.flush(self.config.exit_deadline_s)

    # The batch sizes of a launch.

    def _next_batch(self, step: int) -> None:
        """Begin to measure the next batch size after this step."""
        self.launch.end_batch(step)
        self.profiling.begin_again()
        self._batch_size = self.launch.cut_to or self.launch.whole
        self._other_sizes.clear()
        if self.leads and self.launch.cut_to is not None:
            self._report("running", self.launch.run_id)
        if self.leads:
            self._stop_timing_buckets()  # for the batch size that has been measured
            self._time_buckets(self._batch_size)
        with self.guard("memory"):
            self.memory.reset_peak()

    def _follow_first_rank(self) -> None:
        """Once the ranks have agreed, cut batches as the first rank does, or stop cutting them."""
        smaller = self.plan.smaller_batches if self.plan is not None else ()
        if self.launch.differs(smaller):
            if self.leads and self.launch.cut_to is not None and self._batch_size is not None:
                self._report("pending", self.launch.run_id)  # the run had begun
            self.launch.use(smaller)
            self._batch_size = None

    def _report(self, state: str, run_id: str) -> None:
        path = routes.RUN.format(run_id=run_id)
        self.exporter.put(SpooledRequest("PATCH", path, encode({"state": state}), keep=False))

    def _is_sampled(self, step: int) -> bool:
        """Return True if the step with this number becomes a sample."""
        return self.profiling.plan is not None or step < EVERY_STEP_UNTIL or step % THEN_EVERY == 0

    def _check_accumulation(self, step: int) -> None:
        configured, seen = self.config.grad_accum_steps, self.timer.grad_accum_steps
        if self.leads and step == WATCHED_KNOWN_STEP and configured is not None and configured != seen:
            text = (
                "the script accumulates %d micro-steps per step, but the run requires %d: use the run's "
                "grad_accum_steps"
            )
            logger.warning(text, seen, configured)
        if step == UNWATCHED_KNOWN_STEP and self._optimizer_calls is not None:
            calls, self._optimizer_calls = next(self._optimizer_calls), None
            self._counting.remove()  # not possible within an optimizer's hook, since torch iterates over hooks
            batches = round((step + 1) * seen / max(1, calls))
            if calls and not self.timer.watched and batches > seen:
                text = "the optimizer steps once in %d batches, but %d is assumed: call run.watch(model, optimizer)"
                logger.warning(text, batches, seen)

    def _say_what_changes(self, step: int, warmup: bool) -> None:
        """Warn of signs that later steps will differ from those measured at the beginning of training."""
        if warmup:
            self.timer.rose_from = 0
        if self.timer.rose_from and not self._said_rise:
            self._said_rise = True
            text = (
                "the script's accumulation rose from %d to %d micro-steps per step while it was measured, and may rise "
                "further: for tuning, keep the accumulation constant, or exclude the rise with a larger "
                "profiling_warmup_steps"
            )
            logger.warning(text, self.timer.rose_from, self.timer.grad_accum_steps)
        if step != WATCHED_KNOWN_STEP:
            return
        with self.guard("looking for frozen parameters"):
            parameters = [parameter for model in self.objects.models for parameter in model.parameters()]
            frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
            total = sum(parameter.numel() for parameter in parameters)
            if 2 * frozen > total:
                text = (
                    "%.1f %% of the weights are frozen, and the measurement is valid only while they stay frozen: "
                    "if the script trains them in a later phase, also tune a command that begins with that phase"
                )
                logger.warning(text, min(99.9, 100.0 * frozen / total))

    def _count_operations(self, step: int) -> None:
        """Count the operations of COUNTED_STEP, from the end of the previous step to the end of this step."""
        with self.guard("counting operations"):
            if self._operations is None and step == COUNTED_STEP - 1:
                self._operations = OperationCounter(self.objects.models)
            elif self._operations is not None and step == COUNTED_STEP:
                counter, self._operations = self._operations, None
                if operations := counter.end():
                    self.readings.host["operations"] = operations

    def _read_host(self) -> None:
        """Read the facts about the host once; this takes about 10 ms, since operations are timed. Never raises."""
        host = self.readings.host
        if not self.leads or "cores" in host:
            return
        with self.guard("the host"):
            facts: dict[str, Any] = {"cores": own_cores(self.config.ranks_per_node)}
            if "operations" in host and not (self._device_clock is not None and self._device_clock.capturing()):
                facts["launch_time_s"] = node_time_s(find_device(self.objects.models))
            host.update(facts)  # in one call, since the shipping thread sends the facts as soon as they exist

    def _look_at_switches(self, step: int) -> None:
        """Report the switches observed in one profiling step, and warn of run options that contradict them."""
        with self.guard("inspecting the script's switches"):
            if step == SWITCHES_SEEN_AFTER:
                self._switch_watch = SwitchWatch(list(self.objects.models))
            elif step > SWITCHES_SEEN_AFTER and (watch := self._switch_watch) is not None:
                self._switch_watch = None
                self.readings.host.update(watch.end())
                for sentence in contradictions(dict(self.config.options), self.readings.host):
                    logger.warning("%s", sentence)

    def _read_memory(self) -> None:
        """Read the memory usage, which takes tens of microseconds. Never raises."""
        if not self.guard.works("memory"):
            return
        with self.guard("memory"):
            memory = self.memory.read(list(self.objects.models), list(self.objects.optimizers))
            self.readings.memory[self._batch_size] = memory
            joules = self.energy.joules_per_step(self._batch_size, self.memory.device)
            if joules is not None:
                self.readings.energy_per_step_j[self._batch_size] = joules
            largest = self.memory.largest_local_batch_size()
            if largest is not None:
                step = max(0, self.timer.step - 1)
                self.readings.add_value(step, "largest_local_batch_size", float(largest))

    def _end_report(self, state: str, message: str | None, failed_local_batch_size: int | None) -> list[SpooledRequest]:
        if self.plan is not None and self.stopping:
            state, message, said = "succeeded", None, True  # the run has measured enough, whatever the script did next
        else:
            said = state == "succeeded" and (self.config.supervised or self.launch.several)
            state = "running" if said else state  # the launcher reports how its command ended
        out_of_memory = state == "out_of_memory"
        silent = not out_of_memory and (not self.leads or (said and not self.dropped))
        if silent or (self.joining is not None and self.joining.run_id is None):
            return []
        failed = (failed_local_batch_size or self._batch_size) if out_of_memory else None
        body = {"state": state, "message": message, "dropped": self.dropped}
        body["failed_local_batch_size"] = failed
        fields = {name: value for name, value in body.items() if value is not None}
        return [SpooledRequest("PATCH", routes.RUN.format(run_id=self.launch.run_id), encode(fields))]

    # The shipping thread calls these methods, mostly for a run that the agent itself creates.

    def _collect(self, last: bool) -> list[SpooledRequest]:
        """Return the requests that are due, or none if the run is not known yet or will never exist."""
        if self.joining is not None and not self.joining.ready(last):
            return []
        with beside_captures():
            due = self.requests.collect(last)
        return due if self.joining is None or self.joining.run_id is not None else []

    def seen_configuration(self) -> tuple[int, int] | None:
        """Return the local batch size and micro-steps per step; None until the first step (or the script) has ended."""
        if self._batch_size is None or (self.timer.step == 0 and not self.finished):
            return None
        return self._batch_size, self.timer.grad_accum_steps

    def joined(self, run_id: str) -> None:
        """Store the id of the run, now that it is known."""
        self.launch.own_run_id = run_id
        if self.leads:
            self._report("running", run_id)
        for optimizer in list(self.objects.optimizers):
            self._pull_numbers(optimizer)

    # Gradient-scaling values from the service, and calls from the shipping thread.

    def _pull_numbers(self, optimizer: Any) -> None:
        job_id = self.joining.job_id if self.joining else self.config.job_id
        if not (hasattr(optimizer, "use_served") and self.leads and job_id):
            return
        if self._served_numbers is not None and self._served_numbers.wanted:
            return
        from tula_agent.scaling.pull import ServedNumbers  # the optimizer has imported torch already

        self._served_numbers = ServedNumbers(job_id, optimizer)

    def _poll(self, transport: Transport, last: bool) -> None:
        if (numbers := self._served_numbers) is not None and not last:  # `finish` clears it on another thread
            numbers.poll(transport)
        trainjob, part = self._trainjob, "the TrainJob's status"
        has_run = self.joining is None or self.joining.run_id is not None
        if trainjob is not None and has_run and self.plan is None and self.guard.works(part):
            with self.guard(part):
                trainjob.report(transport, self.launch.own_run_id, last=last)
            if last:
                trainjob.close()

    def _on_reply(self, request: SpooledRequest, reply: Reply) -> None:
        if request.method == "POST" and reply.body and reply.body.get("run_ended") is True:
            self.profiling.stop_soon(request.path.split("/")[3])
