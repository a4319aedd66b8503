"""Defines the interface for training scripts: `init`, and `Run` with `steps`, `watch`, `log` and `finish`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from tula_agent.config import AgentConfig, WantedJob, read_config
from tula_agent.guard import Guard

if TYPE_CHECKING:
    from tula_agent.oom_watch import OomWatch
    from tula_agent.position import Position
    from tula_agent.recorder import Recorder

T = TypeVar("T")

_current: Run | None = None
_exit_pid: int | None = None
"""Id of the process whose exit finishes the run; a forked child has a different id."""
_watches_failures = False
GLOO_RELEASE_S = 0.05
"""Pause in seconds before the model is destroyed.

The model's destructor holds the GIL while it joins gloo's threads. A thread that is still releasing the last reduction
needs the GIL, so without the pause both could wait forever.
"""


def init(
    *,
    job: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    grad_accum_steps: int | None = None,
    model_parallel_size: int = 1,
    batch_size: float | None = None,
    log_to_wandb: bool = False,
) -> Run:
    """Join the run that the environment specifies, and return it; if there is none, return a run that does nothing.

    job: name or id of a job; the default is TULA_JOB. If `tula` did not start the script, the first rank creates a run
    of this job in the background once the first step has revealed the configuration, and all ranks join the run. If no
    job has this name, the agent registers one with dataset_size and epochs (default 1).
    dataset_size: number of examples per epoch over all ranks.
    grad_accum_steps: number of micro-steps per step; needed only if no optimizer is watched.
    model_parallel_size: number of processes that share one replica of the model (pipeline stages times tensor
    parallelism) and count as one rank.
    batch_size: number of examples per rank and micro-step; needed only if neither the loader nor the shape of a batch
    shows it.
    log_to_wandb: True if `Run.log` on the first rank should also log to the script's wandb run, as `tula/NAME` with the
    axis `tula/step`. Each call advances wandb's own step counter, so do not use this if the script passes `step=` to
    `wandb.log`.

    The function never raises. The run finishes automatically when the process ends.
    """
    global _current
    if _current is not None and _current.active:
        _current.finish()
    guard = Guard()
    config: AgentConfig | None = None
    with guard("reading the environment"):
        config = read_config(job=WantedJob(job or "", dataset_size, epochs))
    _current = Run(
        config,
        guard,
        grad_accum_steps=grad_accum_steps,
        model_parallel_size=model_parallel_size,
        batch_size=batch_size,
        log_to_wandb=log_to_wandb,
    )
    _watch_process(failures=_current.active)
    return _current


class Run:
    """This process's part of a run.

    All methods can safely be called in any order, and do nothing while the run is inactive.
    """

    def __init__(
        self,
        config: AgentConfig | None,
        guard: Guard | None = None,
        *,
        grad_accum_steps: int | None = None,
        model_parallel_size: int = 1,
        batch_size: float | None = None,
        log_to_wandb: bool = False,
    ) -> None:
        self.config = config
        self.log_to_wandb = log_to_wandb
        self.guard = guard or Guard()
        self.recorder: Recorder | None = None
        self.oom_watch: OomWatch | None = None
        self._position: Position | None = None
        self._exit_status: Any = None
        self._with_axis: Any = None  # the wandb run for which the agent has defined an axis
        if config is None:
            return
        with self.guard("starting"):
            from tula_agent.recorder import Recorder  # imports an HTTP client, which an inactive run does not need

            self.recorder = Recorder(config, self.guard, grad_accum_steps, model_parallel_size, batch_size)
            self.recorder.ends_for_smaller = self._ends_for_smaller
            self.config = self.recorder.config

    @property
    def active(self) -> bool:
        """Return True if the run is measuring and sending data."""
        return self.recorder is not None and not self.recorder.finished

    @property
    def stopping(self) -> bool:
        """Return True once a profiling run has measured enough; `steps` then yields no more batches."""
        return self.recorder is not None and self.recorder.stopping

    @property
    def position(self) -> Position:
        """Return the position of training in its data, which `checkpoint` writes and `resume` reads."""
        if self._position is None:
            from tula_agent.position import Position

            self._position = Position()
        return self._position

    def steps(self, loader: Iterable[T], *, size: float | Callable[[Any], float] | None = None) -> Steps[T]:
        """Return an iterable over the batches of `loader` that times each batch.

        In a profiling run, a short loader is repeated, and the iteration ends once the run has measured enough.

        size: the number of examples (or tokens, if the job counts tokens) in a batch on this rank, or a function that
        returns this number for a batch; needed only if neither the loader's `batch_size` nor the shape of a batch shows
        it. While gradients are disabled, as in an evaluation, batches are not counted. The result has the loader's
        length and attributes. Exceptions raised by `loader` are not caught.
        """
        return Steps(loader, lambda: self._timed(loader, size))

    def _timed(self, loader: Iterable[T], size: float | Callable[[Any], float] | None) -> Iterator[T]:
        if not _gradients_are_on():
            yield from loader
            return
        recorder = self.recorder if self.active else None
        position = self.position
        self._exit_status = None  # an earlier `sys.exit` was caught
        if recorder is not None:
            if size is not None:
                recorder.sizes.given = size
            self._start_measuring(recorder)
        try:
            repeat = True
            while repeat:
                batches, before = position.begin(loader), position.step
                if recorder is not None:
                    recorder.begin_at(position.epochs_before, position.known)
                while fetched := self._fetch(recorder, position, batches, loader):
                    yield fetched.pop()
                repeat = False
                if recorder is not None and batches is not loader and position.step > before:
                    with self.guard("repeating the loader"):
                        repeat = recorder.may_repeat()
        finally:
            if recorder is not None:
                with self.guard("timing"):
                    recorder.end_epoch()
            position.end()

    def _fetch(
        self, recorder: Recorder | None, position: Position, batches: Iterator[T], loader: Iterable[T]
    ) -> list[T]:
        """Return a list that contains the next batch, or an empty list at the end.

        The caller pops the batch from the list, so that the agent keeps no reference and the script can free the batch
        within a step.

        This method runs at every step, so it uses `try` instead of the guard's context manager, which would take longer
        than the call itself.
        """
        if recorder is not None:
            try:
                recorder.want_batch()
            except Exception as error:
                self.guard.note("timing", error)
            if recorder.stopping:
                return []
        try:
            batch = next(batches)
        except StopIteration:
            return []
        if recorder is not None:
            if recorder.launch.cut_to is not None:
                batch = recorder.cut(batch, loader)
            try:
                recorder.batch_ready(batch, loader)
            except Exception as error:
                self.guard.note("timing", error)
        position.consumed += 1
        position.step += 1
        return [batch]

    def _start_measuring(self, recorder: Recorder) -> None:
        with self.guard("starting to measure"):
            recorder.begin_epoch()
        with self.guard("watching for out-of-memory errors"):
            if self.oom_watch is None:
                self._start_oom_watch(recorder)

    def _start_oom_watch(self, recorder: Recorder) -> None:
        from tula_agent.oom_watch import OomWatch

        def report(message: str | None, batch: int | None) -> None:
            with self.guard("reporting out of memory"):
                recorder.finish("out_of_memory", message, batch)

        self.oom_watch = OomWatch(
            recorder.channel if recorder.world_size > 1 else None,
            rank=recorder.config.rank,
            report=report,
            batch_size=lambda: recorder.local_batch_size,
            progress=lambda: (recorder.timer.batches, recorder.timer.in_step),
        )
        self.oom_watch.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside `with run.paused():` from all steps, for example to evaluate or save within the loop.

        The measured step time then does not depend on how often the script pauses. Calls may be nested, and exceptions
        are not caught.
        """
        outermost = False
        if self.recorder is not None:
            with self.guard("timing"):
                outermost = self.recorder.pause()
        try:
            yield
        finally:
            if outermost and self.recorder is not None:
                with self.guard("timing"):
                    self.recorder.unpause()

    def begin_at(self, epoch: float) -> None:
        """Report where training continues if the script loads its own checkpoints; `resume` calls this method itself.

        epoch: the number of completed epochs, such as 2.5 in the middle of the third epoch. Call this method before the
        first step, since the service's advice and its predictions of the remaining time and cost depend on `epoch`.
        """
        with self.guard("reporting where training continues"):
            self.position.epochs_before = min(max(0.0, float(epoch)), 1e6)
            self.position.known = True

    def begin_loop(self, *, cuts: bool = False) -> None:
        """Start measuring a loop that a framework runs; call this method just before the first iteration."""
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            recorder.begin_at(self.position.epochs_before, self.position.known)
            if not cuts:
                recorder.measure_whole_batches("the framework passes the batches to the script")
            self._start_measuring(recorder)
            with self.guard("timing"):
                recorder.want_batch()

    def cut(self, batch: Any) -> Any:
        """Return the examples of `batch` to train on, which are only the first ones while a smaller batch size is
        measured.
        """
        return batch if self.recorder is None else self.recorder.cut(batch, None)

    def batch_arrived(self, batch: Any, loader: Any = None, micro_steps: int = 1) -> None:
        """Record that the framework is about to process a batch, or `micro_steps` batches before its next report."""
        if self.recorder is not None and not self.recorder.finished:
            with self.guard("timing"):
                self.recorder.batch_ready(batch, loader, micro_steps)

    def batch_done(self) -> None:
        """Record that the framework has finished the batch and requests the next one."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.want_batch()

    def end_loop(self) -> None:
        """Stop measuring the loop when the framework leaves it for an evaluation, or at the end of training."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.end_epoch()

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Measure `model` (one or several modules, with or without DDP) and `optimizer` (one or several) in more
        detail.

        The agent then also measures memory by component, the gradient norm, and separate compute and communication
        times. Call this method when all objects have been built and DDP has wrapped the model. Only a `TulaOptimizer`
        that is passed as `optimizer` reports the gradient noise scale (docs/embed.md explains why). A GradScaler need
        not be passed, because it unscales the gradients before an optimizer's step hooks run; if it skips a step, the
        agent detects the end of the step by counting micro-steps.
        """
        if self.recorder is not None:
            with self.guard("watching the model"):
                self.recorder.watch(_many(model), _many(optimizer))

    def largest_local_batch_size(self) -> int | None:
        """Return the largest batch size that is predicted to fit into this rank's memory, without trying any batch.

        Returns None if there is no run, or if the memory of a watched model has not been read yet (this happens after
        the fifth step). A prediction from a single batch size tends to be too small; see `tula_wire.memory`.
        """
        return self.recorder.memory.largest_local_batch_size() if self.recorder is not None else None

    def log(self, **values: Any) -> None:
        """Log named values of the current step, such as loss or validation_accuracy; any lower-case name is allowed.

        Values can be tensors; a tensor on a device is copied in the background, without waiting.
        """
        if self.recorder is not None:
            try:  # `try`, since this runs at every step, like `_fetch`
                step = self.recorder.log(values)
                if self.log_to_wandb and step is not None:
                    self._log_to_wandb(values, step)
            except Exception as error:
                self.guard.note("logging values", error)

    def _log_to_wandb(self, values: Mapping[str, Any], step: int) -> None:
        """Log `values` of `step` to the script's wandb run, if there is one, as `tula/NAME` with the axis `tula/step`.

        A separate axis is used instead of `step=`, since wandb would drop the script's values if their step were lower.
        """
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            if run is not self._with_axis:
                self._with_axis = run
                run.define_metric("tula/*", step_metric="tula/step")
            own = {f"tula/{name}": value for name, value in values.items() if value is not None}
            run.log(own | {"tula/step": step})

    def finish(self, *, succeeded: bool = True, message: str | None = None) -> None:
        """Send the remaining measurements within a few seconds, and report how the run ended.

        The agent calls this method automatically when the process ends. Afterwards, the agent keeps no reference to the
        model, the optimizer or the ranks' store.
        """
        recorder = self.recorder
        if recorder is None:
            return
        # One deadline applies to everything, including a report that the out-of-memory watch is sending.
        ends = time.monotonic() + recorder.config.exit_deadline_s
        with self.guard("finishing"):
            watch, self.oom_watch = self.oom_watch, None
            if watch is not None:
                watch.stop()
            if not recorder.finished:
                recorder.finish("succeeded" if succeeded else "failed", message)
            if watch is not None:
                watch.close(ends - time.monotonic())

    def report_out_of_memory(self, error: BaseException | None = None, local_batch_size: int | None = None) -> None:
        """Report that the batch does not fit into memory; if there are several ranks, all of them end within ten
        seconds.

        Call this method if the script catches the error. If the error ends the process, the agent reports it
        automatically.
        """
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            with self.guard("reporting out of memory"):
                text = f"{type(error).__name__}: {error}"[:2000] if error is not None else None
                self._end_out_of_memory(text, local_batch_size)

    def _ends_for_smaller(self, size: int, planned: int) -> bool:
        """End a profiling run with batch size `planned` if the script caught an out-of-memory error and now uses
        `size`.

        Together, the error and the subsequent smaller batch show that the planned batch does not fit.
        """
        from tula_agent.oom_watch import caught_by_the_script

        caught = caught_by_the_script()
        if caught is not None:
            text = f"The script lowered its batch size from {planned} to {size} after this error: {caught}"
            self._end_out_of_memory(text[:2000], planned)
        return caught is not None

    def _end_out_of_memory(self, text: str | None, local_batch_size: int | None) -> None:
        if self.oom_watch is not None:
            self.oom_watch.notify(text, local_batch_size)
        elif self.recorder is not None:
            self.recorder.finish("out_of_memory", text, local_batch_size)

    def report_exception(self, error: BaseException) -> None:
        """Report the exception that ends training; report an out-of-memory error as such."""
        with self.guard("reporting a failure"):
            from tula_agent.oom_watch import is_out_of_memory

            if self.recorder is not None and self.active and self.recorder.measured_enough():
                self.finish()
            elif is_out_of_memory(error):
                self.report_out_of_memory(error)
            else:
                self.finish(succeeded=False, message=f"{type(error).__name__}: {error}"[:2000])

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint with `tula_agent.checkpoint.save`, and exclude the time for writing from all steps."""
        with self.paused():
            return import_module("tula_agent.checkpoint").save(self.position, *args, **kwargs)

    def resume(self, *args: Any, **kwargs: Any) -> Any:
        """Resume from the newest checkpoint with `tula_agent.checkpoint.resume`."""
        return import_module("tula_agent.checkpoint").resume(self.position, *args, **kwargs)


class Steps(Generic[T]):
    """Iterable that `Run.steps` returns; iterates over a loader, and otherwise behaves like the loader itself."""

    def __init__(self, loader: Iterable[T], begin: Callable[[], Iterator[T]]) -> None:
        self._loader = loader
        self._begin = begin
        self._iterator: Iterator[T] | None = None  # only if the script calls `next` itself

    def __iter__(self) -> Iterator[T]:
        """Begin the loop, and return its iterator."""
        return self._begin()

    def __next__(self) -> T:
        """Return the next batch, for a script that calls `next` itself."""
        if self._iterator is None:
            self._iterator = self._begin()
        return next(self._iterator)

    def __len__(self) -> int:
        """Return the loader's length; raise TypeError if it has none, even if the loader raises another error."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except Exception as error:  # `list()` requests the length, and ignores only a TypeError
            raise TypeError(f"this loader has no length: {error!r}") from error

    def __getattr__(self, name: str) -> Any:
        """Return the loader's attribute of this name, such as `sampler`, `dataset` or `batch_size`."""
        if name == "_loader":  # requested while a copy is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


def _gradients_are_on() -> bool:
    torch = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _watch_process(*, failures: bool) -> None:
    """Finish the run when this process ends; if `failures` is True, report the exception or exit status that ends it.

    `sys.excepthook` and `sys.exit` are replaced because `atexit` functions receive neither the exception nor the
    status. Each replacement calls the function that it replaces.
    """
    global _exit_pid, _watches_failures
    if _exit_pid != os.getpid():
        _exit_pid = os.getpid()
        atexit.register(_finish_at_exit, _exit_pid)
    if not failures or _watches_failures:
        return
    _watches_failures = True
    previous_hook, previous_exit = sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if _current is not None and os.getpid() == _exit_pid:
            _current.report_exception(error)
        previous_hook(kind, error, at)

    def exit(status: Any = None, /) -> NoReturn:
        if _current is not None and threading.current_thread() is threading.main_thread():
            _current._exit_status = status
        previous_exit(status)

    sys.excepthook = hook
    sys.exit = exit


def _finish_at_exit(pid: int) -> None:
    """Finish the run before the interpreter shuts down, and drop all references to the script (docs/limits.md).

    A run that the script did not finish counts as succeeded, unless `sys.exit` was called with a status other than 0.
    """
    global _current
    if os.getpid() != pid:
        return
    run, _current = _current, None
    if run is None:
        return
    status = run._exit_status
    if status is None or status == 0:
        run.finish()
    else:
        run.finish(succeeded=False, message=f"the script called sys.exit({status!r})"[:2000])
    if run.recorder is not None:
        time.sleep(GLOO_RELEASE_S)
        del run
        gc.collect()  # a process's first DDP model is in a reference cycle, through frames that an import keeps
