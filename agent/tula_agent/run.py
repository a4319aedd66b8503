"""The interface for training scripts: `init`, and `Run` with `steps`, `watch`, `log` and `finish`."""

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
"""Id of the process whose end finishes the run; a child forked from it has another id."""
_watches_failures = False
GLOO_RELEASE_S = 0.05
"""A pause before the model is destroyed.

Its destructor holds the GIL while it joins gloo's threads; a thread that is still releasing the last reduction needs
the GIL, so both would wait forever.
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
    """Join the run that the environment names, and return it; without one, return a run that does nothing.

    job: name or id of a job (or TULA_JOB). If `tula` has not started the script, the first rank creates a run of this
    job in the background once a step has shown its configuration, and all ranks join it. If no job has this name, one
    is registered with dataset_size and epochs (default 1).
    dataset_size: examples per epoch over all ranks.
    grad_accum_steps: micro-steps per step; needed only if no optimizer is watched.
    model_parallel_size: number of processes that share one replica of the model (pipeline stages times tensor
    parallelism) and count as one rank.
    batch_size: examples per rank and micro-step; needed only if neither the loader nor the shape of a batch shows it.
    log_to_wandb: `Run.log` on the first rank also logs to the script's wandb run, as `tula/NAME` over `tula/step`. Each
    call is one step of wandb's own counter, so leave it off if the script passes `step=` to `wandb.log`.

    Never raises. The run finishes by itself when the process ends.
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

    All methods are safe to call in any order, and do nothing while the run is inactive.
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
        self._with_axis: Any = None  # wandb's run that knows the axis of what the agent logs
        if config is None:
            return
        with self.guard("starting"):
            from tula_agent.recorder import Recorder  # imports an HTTP client, which an inactive run does not need

            self.recorder = Recorder(config, self.guard, grad_accum_steps, model_parallel_size, batch_size)
            self.recorder.ends_for_smaller = self._ends_for_smaller
            self.config = self.recorder.config

    @property
    def active(self) -> bool:
        """Return True while the run measures and sends."""
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
        """Return the batches of `loader`, each timed.

        A profiling run repeats a short loader, and ends once it has measured enough.

        size: examples (or tokens, if the job counts in tokens) of a batch on this rank, or a function of the batch that
        counts them; needed only if neither the loader's `batch_size` nor the shape of a batch shows it. While gradients
        are off (an evaluation), batches pass through without being counted. `len()` and all attributes of the result
        are the loader's. Exceptions of `loader` pass through.
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
        """Return the next batch in a list, or an empty list at the end.

        The caller pops the batch from the list, so that no reference stays here and a script can free its batch within
        a step.

        This runs at every step, hence `try` instead of the guard's context manager, which would cost more than the
        call.
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
        with self.guard("watching for out of memory"):
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
        """Exclude the time in this context from all steps, for evaluating or saving within the loop: `with
        run.paused():`.

        The measured step time then does not depend on how often the script pauses. Calls may be nested; exceptions pass
        through.
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
        """Report where training continues if the script loads its own checkpoints; `resume` does so by itself.

        epoch: the number of completed epochs, such as 2.5 in the middle of the third. Call this before the first step:
        the service's predictions of the remaining time and cost, and its advice, depend on it.
        """
        with self.guard("reporting where training continues"):
            self.position.epochs_before = min(max(0.0, float(epoch)), 1e6)
            self.position.known = True

    def begin_loop(self, *, cuts: bool = False) -> None:
        """Begin a loop that a framework runs, just before it iterates."""
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            recorder.begin_at(self.position.epochs_before, self.position.known)
            if not cuts:
                recorder.measure_whole_batches("the framework hands the script its batches")
            self._start_measuring(recorder)
            with self.guard("timing"):
                recorder.want_batch()

    def cut(self, batch: Any) -> Any:
        """Return the examples of `batch` to train on: only the first ones while a smaller batch is measured."""
        return batch if self.recorder is None else self.recorder.cut(batch, None)

    def batch_arrived(self, batch: Any, loader: Any = None, micro_steps: int = 1) -> None:
        """Note that the framework starts on a batch, or on `micro_steps` batches before its next report."""
        if self.recorder is not None and not self.recorder.finished:
            with self.guard("timing"):
                self.recorder.batch_ready(batch, loader, micro_steps)

    def batch_done(self) -> None:
        """Note that the framework has finished the batch and requests the next."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.want_batch()

    def end_loop(self) -> None:
        """End the loop when the framework leaves it to evaluate, or at the end of training."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.end_epoch()

    def watch(self, model: Any, optimizer: Any = None) -> None:
        """Measure `model` (a module or several, DDP or not) and `optimizer` (one or several) more closely.

        This adds memory by component, the gradient norm, and separate times of compute and communication. Call it once
        everything is built, after DDP wraps the model. Only a `TulaOptimizer` given as `optimizer` reports the gradient
        noise scale (docs/embed.md says why). A GradScaler is not needed: it unscales before an optimizer's step hooks
        run, and a step that it skips ends by counting.
        """
        if self.recorder is not None:
            with self.guard("watching the model"):
                self.recorder.watch(_many(model), _many(optimizer))

    def largest_local_batch_size(self) -> int | None:
        """Return the largest batch per rank that should fit into this rank's memory, predicted without trying it.

        Returns None without a run, and until a watched model has taken a few steps and its memory was read (after the
        fifth step). A prediction from a single batch size errs on the small side; see `tula_wire.memory`.
        """
        return self.recorder.memory.largest_local_batch_size() if self.recorder is not None else None

    def log(self, **values: Any) -> None:
        """Log named numbers of the current step: loss, accuracy, validation_accuracy, or any other name in lower case.

        Tensors are fine: a tensor on a device is copied in the background, without waiting.
        """
        if self.recorder is not None:
            try:  # called at every step, as `_fetch`
                step = self.recorder.log(values)
                if self.log_to_wandb and step is not None:
                    self._log_to_wandb(values, step)
            except Exception as error:
                self.guard.note("logging values", error)

    def _log_to_wandb(self, values: Mapping[str, Any], step: int) -> None:
        """Log `values` of `step` to the script's wandb run, if it has one, as `tula/NAME` over `tula/step`.

        They get a separate axis instead of `step=`, since wandb would drop the script's values if their step is lower.
        """
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            if run is not self._with_axis:
                self._with_axis = run
                run.define_metric("tula/*", step_metric="tula/step")
            own = {f"tula/{name}": value for name, value in values.items() if value is not None}
            run.log(own | {"tula/step": step})

    def finish(self, *, succeeded: bool = True, message: str | None = None) -> None:
        """Send the rest, within a few seconds, and report how the run ended. Called automatically at exit.

        Afterwards the agent keeps no reference to the model, the optimizer or the ranks' store.
        """
        recorder = self.recorder
        if recorder is None:
            return
        # One deadline for everything, including a report that the out-of-memory watch is sending.
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
        """Report that this batch does not fit; with several ranks, all of them end within ten seconds.

        Call it if the script catches the error itself; the agent reports an error that ends the process by itself.
        """
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            with self.guard("reporting out of memory"):
                text = f"{type(error).__name__}: {error}"[:2000] if error is not None else None
                self._end_out_of_memory(text, local_batch_size)

    def _ends_for_smaller(self, size: int, planned: int) -> bool:
        """End a profiling run of `planned` examples if its script caught an out-of-memory error and now uses `size`.

        The error and the smaller batch after it together show that the planned batch does not fit.
        """
        from tula_agent.oom_watch import caught_by_the_script

        caught = caught_by_the_script()
        if caught is not None:
            text = f"The script lowered its batch from {planned} to {size} after: {caught}"
            self._end_out_of_memory(text[:2000], planned)
        return caught is not None

    def _end_out_of_memory(self, text: str | None, local_batch_size: int | None) -> None:
        if self.oom_watch is not None:
            self.oom_watch.notify(text, local_batch_size)
        elif self.recorder is not None:
            self.recorder.finish("out_of_memory", text, local_batch_size)

    def report_exception(self, error: BaseException) -> None:
        """Report the exception that ends training, as out of memory if it is such an error."""
        with self.guard("reporting a failure"):
            from tula_agent.oom_watch import is_out_of_memory

            if self.recorder is not None and self.active and self.recorder.measured_enough():
                self.finish()
            elif is_out_of_memory(error):
                self.report_out_of_memory(error)
            else:
                self.finish(succeeded=False, message=f"{type(error).__name__}: {error}"[:2000])

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write a checkpoint as `tula_agent.checkpoint.save` does; its time does not count toward any step."""
        with self.paused():
            return import_module("tula_agent.checkpoint").save(self.position, *args, **kwargs)

    def resume(self, *args: Any, **kwargs: Any) -> Any:
        """Resume from the newest checkpoint as `tula_agent.checkpoint.resume` does."""
        return import_module("tula_agent.checkpoint").resume(self.position, *args, **kwargs)


class Steps(Generic[T]):
    """The result of `Run.steps`: iterates over a loader, and behaves like the loader in every other respect."""

    def __init__(self, loader: Iterable[T], begin: Callable[[], Iterator[T]]) -> None:
        self._loader = loader
        self._begin = begin
        self._iterator: Iterator[T] | None = None  # of a script that calls `next` itself

    def __iter__(self) -> Iterator[T]:
        """Begin the loop; return its iterator."""
        return self._begin()

    def __next__(self) -> T:
        """Return the next batch of a loop that the script drives with `next`."""
        if self._iterator is None:
            self._iterator = self._begin()
        return next(self._iterator)

    def __len__(self) -> int:
        """Return the loader's length. Raises TypeError if it has none, whatever the loader's own method raises."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except Exception as error:  # `list()` asks for a length, and takes no other error for an answer
            raise TypeError(f"this loader has no length: {error!r}") from error

    def __getattr__(self, name: str) -> Any:
        """Return the loader's attribute of this name, such as `sampler`, `dataset` or `batch_size`."""
        if name == "_loader":  # of a copy that is being made
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
    """Finish the run when this process ends; with `failures`, report the exception or status that ends it.

    `sys.excepthook` and `sys.exit` are replaced because `atexit` functions get neither the exception nor the status.
    Both replacements call the function that was there before.
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
    """Finish the run before the interpreter shuts down, since no reference to the job may survive (see docs/limits.md).

    A run that the script did not finish has succeeded, unless `sys.exit` was called with a status other than 0.
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
        run.finish(succeeded=False, message=f"the script left with sys.exit({status!r})"[:2000])
    if run.recorder is not None:
        time.sleep(GLOO_RELEASE_S)
        del run
        gc.collect()  # the first DDP model of a process is in a cycle: an import in its constructor keeps frames
