"""What a training script sees: `init`, and the run with `steps`, `watch`, `log` and `finish`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tula_agent.config import AgentConfig, read_config
from tula_agent.guard import Guard

if TYPE_CHECKING:
    from tula_agent.out_of_memory import OutOfMemoryWatch
    from tula_agent.position import Position
    from tula_agent.recorder import Recorder

__all__ = ["Run", "init"]

T = TypeVar("T")

_current: Run | None = None
_ends_in: int | None = None  # the process that `_process_ends` is registered in
_watching = False
_GLOO_LETS_GO_S = 0.05
"""A pause before the model dies: its end waits, with the GIL, for gloo's threads; one that still lets go of the
last reduction needs that very GIL, and both would wait for ever."""


def init(*, dataset_size: int | None = None, epochs: float | None = None, grad_accum_steps: int | None = None) -> Run:
    """Join the run that the environment names; without one, a run that does nothing and costs nothing.

    dataset_size: examples per epoch over all ranks; epochs: how many are planned; grad_accum_steps: micro-steps per
    step, only needed where no optimizer is watched. Never raises, and finishes by itself when the process ends.
    """
    global _current
    if _current is not None and _current.active:
        _current.finish()
    guard = Guard()
    config: AgentConfig | None = None
    with guard("reading the environment"):
        config = read_config()
    _current = Run(config, guard, dataset_size=dataset_size, epochs=epochs, grad_accum_steps=grad_accum_steps)
    _watch_the_end(_current.active)
    return _current


class Run:
    """This process's part of a run. Every method is safe to call in any order, and does nothing when inactive."""

    def __init__(
        self,
        config: AgentConfig | None,
        guard: Guard | None = None,
        *,
        dataset_size: int | None = None,
        epochs: float | None = None,
        grad_accum_steps: int | None = None,
    ) -> None:
        self.config = config
        self.dataset_size = dataset_size
        self.epochs = epochs
        self.guard = guard or Guard()
        self.recorder: Recorder | None = None
        self._position: Position | None = None
        self._memory_watch: OutOfMemoryWatch | None = None
        self._exit_status: Any = None
        if config is None:
            return
        with self.guard("starting"):
            from tula_agent.recorder import Recorder  # brings an HTTP client: only where there is somewhere to send

            self.recorder = Recorder(config, self.guard, dataset_size, grad_accum_steps)
            self.config = config = self.recorder.config
        if config.stacks_at_s is not None:
            with self.guard("showing stacks at the time limit"):
                from tula_agent.stacks import show_at

                show_at(config.stacks_at_s, config.rank)

    @property
    def active(self) -> bool:
        """True while something is measured and shipped."""
        return self.recorder is not None and not self.recorder.finished

    @property
    def stopping(self) -> bool:
        """True once a profiling run has measured enough; `steps` then yields nothing, and a loop may break."""
        return self.recorder is not None and self.recorder.stopping

    def steps(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of `loader`, each timed. A profiling run repeats a short loader, and ends by itself.

        What `loader` raises is the script's own and passes through.
        """
        recorder = self.recorder
        position = self.position
        self._exit_status = None  # a `sys.exit` before was caught
        if recorder is None or recorder.finished:
            for batch in position.begin(loader):
                position.took()
                handed = [batch]
                del batch
                yield handed.pop()  # the loop's body alone holds it, and may free it
            position.end()
            return
        with self.guard("starting to measure"):
            recorder.begin_epoch(loader)
        with self.guard("looking out for out of memory"):
            self._look_out(recorder)
        try:
            repeat = True
            while repeat:
                repeat = False
                for_this_pass = position.begin(loader)
                recorder.reporter.begins_at(position)
                repeatable = for_this_pass is not loader
                while True:
                    try:
                        recorder.want_batch()
                    except Exception as error:  # the guard's work, inlined: this runs every step
                        self.guard.note("timing", error)
                    if recorder.stopping:
                        return
                    try:
                        batch = next(for_this_pass)
                    except StopIteration:
                        break
                    try:
                        recorder.batch_ready(batch, loader)
                    except Exception as error:
                        self.guard.note("timing", error)
                    repeat = repeatable
                    position.took()
                    handed = [batch]
                    del batch
                    yield handed.pop()
                with self.guard("repeating the loader"):
                    repeat = repeat and recorder.may_repeat()
        finally:
            with self.guard("timing"):
                recorder.end_epoch()
            position.end()

    def begin_at(self, epoch: float) -> None:
        """Say where training goes on, for a script that loads checkpoints of its own; `resume` says so by itself.

        epoch: passes over the data that are behind it: 2.5 in the middle of the third. Call it before the first step;
        time and cost that the service says are left, and its advice, rest on it.
        """
        with self.guard("telling where training goes on"):
            self.position.epochs_before = min(max(0.0, float(epoch)), 1e6)
            self.position.told = True

    def begin_loop(self, loader: Any = None) -> None:
        """For a loop that belongs to a framework: it is about to go over `loader`."""
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            recorder.reporter.begins_at(self.position)
            with self.guard("starting to measure"):
                recorder.begin_epoch(loader)
            with self.guard("looking out for out of memory"):
                self._look_out(recorder)
            with self.guard("timing"):
                recorder.want_batch()

    def batch_arrived(self, batch: Any, loader: Any = None, micro_steps: int = 1) -> None:
        """The framework has a batch and begins to work on it; or on `micro_steps` of them, before its next report."""
        if self.recorder is not None and not self.recorder.finished:
            with self.guard("timing"):
                self.recorder.batch_ready(batch, loader)
                self.recorder.timer.more_micro_steps(micro_steps - 1)
                self.recorder.watched.show(batch, micro_steps - 1)

    def batch_done(self) -> None:
        """The framework is done with that batch and asks for the next."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.want_batch()

    def end_loop(self) -> None:
        """The framework leaves its loop, to evaluate or for good."""
        if self.recorder is not None:
            with self.guard("timing"):
                self.recorder.end_epoch()

    @property
    def position(self) -> Position:
        """Where the training stands in its data; `checkpoint` and `resume` write and read it."""
        if self._position is None:
            from tula_agent.position import Position

            self._position = Position()
        return self._position

    def _look_out(self, recorder: Recorder) -> None:
        """Once, when the ranks are about to train together: see `tula_agent.out_of_memory`."""
        if self._memory_watch is None:
            from tula_agent.out_of_memory import watch_for

            self._memory_watch = watch_for(self, recorder)

    def watch(self, model: Any, optimizer: Any = None, scaler: Any = None, *, comm_hook: bool = False) -> None:
        """Measure `model` (a module or several, DDP or not) and `optimizer` (one or several) more closely.

        Adds memory by component, the gradient norm, and compute apart from communication; `scaler` is the GradScaler
        in use. Call it once everything is built, after DDP wraps the model. comm_hook (or TULA_COMM_HOOK=1) takes DDP's
        one communication hook, if it is free, to measure the gradient noise scale; on all ranks or on none.
        """
        if self.recorder is not None:
            with self.guard("watching the model"):
                self.recorder.watch(_many(model), _many(optimizer), scaler, comm_hook)

    def largest_local_batch_size(self) -> int | None:
        """The largest batch per rank that should fit into this rank's memory, predicted without trying it.

        None until a watched model has done a few steps and memory was read (the fifth step), or without a run. From
        one batch size the prediction errs on the small side; see `tula_agent.measure.headroom`.
        """
        return self.recorder.memory.headroom.largest_local_batch_size() if self.recorder is not None else None

    def log(self, **values: Any) -> None:
        """Named numbers of the current step: loss, accuracy, validation_accuracy, or any other name in lower case.

        Tensors may be given as they are: those on a device are read later, without waiting.
        """
        if self.recorder is not None:
            with self.guard("logging values"):
                self.recorder.log(values)

    def finish(self, *, succeeded: bool = True, message: str | None = None) -> None:
        """Deliver what is left, within a few seconds, and say how the run ended. Called by itself at exit.

        Afterwards nothing of the job (model, optimizer, the ranks' store) is held here any more.
        """
        recorder = self.recorder
        if recorder is None:
            return
        # One deadline for all that is waited for; what the look-out has under way may be its report, and is waited for.
        ends = time.monotonic() + recorder.config.exit_deadline_s
        with self.guard("finishing"):
            watch, self._memory_watch = self._memory_watch, None
            if watch is not None:
                watch.stop()
            if not recorder.finished:
                recorder.finish("succeeded" if succeeded else "failed", message)
            if watch is not None:
                watch.close(ends - time.monotonic())

    def _process_ends(self) -> None:
        """At exit: a run that nobody finished has succeeded, unless `sys.exit` was told otherwise."""
        status = self._exit_status
        if status is None or status == 0:
            self.finish()
        else:
            self.finish(succeeded=False, message=f"the script left with sys.exit({status!r})"[:2000])

    def report_out_of_memory(self, error: BaseException | None = None, local_batch_size: int | None = None) -> None:
        """Tell the service that this batch does not fit; with several ranks, all of them end within ten seconds.

        For scripts that catch the error themselves; one that ends the process is reported without this.
        """
        recorder = self.recorder
        if recorder is not None and not recorder.finished:
            with self.guard("reporting out of memory"):
                text = f"{type(error).__name__}: {error}"[:2000] if error is not None else None
                if self._memory_watch is not None:
                    self._memory_watch.tell(text, local_batch_size)
                else:
                    recorder.finish("out_of_memory", text, local_batch_size)

    def checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """See `tula_agent.checkpoint.save`."""
        return import_module("tula_agent.checkpoint").save(self, *args, **kwargs)

    def resume(self, *args: Any, **kwargs: Any) -> Any:
        """See `tula_agent.checkpoint.resume`."""
        return import_module("tula_agent.checkpoint").resume(self, *args, **kwargs)

    def roll_back(self, *args: Any, **kwargs: Any) -> bool:
        """See `tula_agent.checkpoint.roll_back`."""
        return bool(import_module("tula_agent.checkpoint").roll_back(self, *args, **kwargs))


def _many(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _watch_the_end(active: bool) -> None:
    """Be told of the end of this process and, where there is a run, of an exception that ends it. Once per process."""
    global _ends_in, _watching
    if _ends_in != os.getpid():
        _ends_in = os.getpid()
        atexit.register(_process_ends, _ends_in)
    if active and not _watching:
        _watching = True
        _watch_exceptions()


def _process_ends(pid: int) -> None:
    """The interpreter is about to be torn down, and must find nothing of the job held here: see docs/limits.md."""
    global _current
    run, _current = _current, None
    if run is not None and os.getpid() == pid:
        run._process_ends()
        if run.recorder is not None:
            time.sleep(_GLOO_LETS_GO_S)
            del run
            gc.collect()  # a process's first DDP model dies no earlier: an import in its constructor keeps frames


def _watch_exceptions() -> None:
    """An exception that ends the process is reported as such; the hook that was there still runs."""
    before, leave = sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        run = _current
        if run is not None and os.getpid() == _ends_in:
            with run.guard("reporting a failure"):
                from tula_agent.out_of_memory import is_out_of_memory

                if is_out_of_memory(error):
                    run.report_out_of_memory(error)
                else:
                    run.finish(succeeded=False, message=f"{kind.__name__}: {error}"[:2000])
        before(kind, error, at)

    def noted(status: Any = None, /) -> NoReturn:
        if _current is not None and threading.current_thread() is threading.main_thread():
            _current._exit_status = status  # no hook and no exit handler is told
        leave(status)

    sys.excepthook = hook
    sys.exit = noted
