"""Measures a training loop that does not use the agent, by observing its optimizer steps and its data loaders."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter, deque
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from tula_agent.config import is_launched, read_config
from tula_agent.guard import Guard, logger
from tula_agent.rank_channel import current_group
from tula_agent.run import GLOO_RELEASE_S, Run, init
from tula_agent.torch_private import (
    has_yielded,
    index_sampler,
    joins_uneven_inputs,
    loader_iterator_class,
    loader_workers,
)

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from tula_agent.recorder import Recorder

_AHEAD = "accelerate"
"""The framework whose loader prefetches one batch; transformers' Trainer is based on this framework."""
_SAY_AFTER = 3
"""Number of steps after which the loop logs what it cannot observe."""
_MOST_STEPS_A_BATCH = 8
"""Maximum number of optimizer steps per batch (a GAN's critic takes several). A script that takes more is assumed to
request no batches.
"""
_LOADERS_KEPT = 8
_LISTS_HELD = 2
"""Number of list datasets to keep alive, since a list allows no weak reference. A script typically trains on one list
and evaluates on another.
"""
_FOLLOW_AFTER = 32
"""Number of consecutive steps of another optimizer after which the loop watches that optimizer instead."""


class UneditedLoop:
    """Drives a `Run` as `Run.steps` does, but by observing the script's batch requests, backward passes and optimizer
    steps.

    The loop begins at the first optimizer step after the process group is created. It observes only the main thread,
    since a profiling run could not end the script from another thread.

    A training step ends when the script requests the next batch after an optimizer step, so the work between two steps
    is included. It ends at the optimizer step itself if the script requests no batch (because it has no DataLoader, or
    `itertools.cycle` keeps the batches) or if a framework prefetches batches. All loaders that the script uses at every
    step are training loaders; the one whose batches have the run's batch size determines the size of a step. Batches
    that are loaded while gradients are disabled belong to an evaluation, and so do batches of another loader if no
    backward pass follows before the next training batch. An evaluation is not part of any step.

    The number of micro-steps in a step is its number of backward passes or of batches, whichever is smaller: a GAN runs
    several backward passes per batch, and in some frameworks the first rank loads batches for the other ranks. A launch
    that measures several batch sizes cuts each batch when a loader delivers it, unless a framework prefetches batches.
    """

    def __init__(self, run: Run, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._recorder = run, recorder
        self._steps = 0
        self._steps_of_others: Counter[int] = Counter()  # by id; cleared at each step of the watched optimizer
        self._left = False
        self._size = recorder.config.local_batch_size or 1
        self._numbers: dict[int, tuple[int, Any]] = {}  # by the dataset's id, with a weak reference
        self._lists: dict[int, Any] = {}  # datasets that are lists, by id; the most recently used is last
        self._next_number = count()
        # By a loader's `_key`: the number of its batches since the last step, and the size of its last batch.
        self._counts: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._asked_before: set[int] = set()  # loaders used in the previous step
        self._last: int | None = None
        self._recent: deque[int] = deque(maxlen=_LOADERS_KEPT)  # loaders that delivered the last batch before a step
        self._training: set[int] = set()
        self._main: int | None = None  # the training loader that determines the size of a step
        # State since the end of the last step.
        self._stepped = False
        self._runs = False  # True: the step is being timed
        self._evaluated = False
        self._batches = self._backwards = 0
        self._ended = False  # True: the training loader is exhausted, and no step has followed
        self._ahead = False  # True: a framework prefetches one batch
        self._steps_of_batch, self._usual_steps = 0, 1  # steps since the last batch request, and the highest count yet
        self._replaying: str | None = None  # the run in which the script reuses the batches that it kept
        self._sees_backwards = False
        objects = gc.get_objects()  # takes some tens of milliseconds, once
        models = [thing for thing in objects if issubclass(type(thing), torch.nn.parallel.DistributedDataParallel)]
        self._loads = any(has_yielded(thing) for thing in objects)
        del objects
        self._models = len(models)
        self._joins = any(joins_uneven_inputs(model) for model in models)
        run.watch(models)
        self._hook: RemovableHandle | None = None
        self._follow(optimizer)
        run.begin_loop(cuts=True)
        if self._joins:
            recorder.measure_alone("ranks can take different numbers of steps under model.join()")
        if not self._loads:
            self._batch_comes_unseen()
        _see_batches(self, run.guard)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Count `optimizer`'s steps as training steps, and backward passes that reach its parameters as micro-steps."""
        self._optimizer = weakref.ref(optimizer)
        self._steps_of_others.clear()
        self._run.watch(None, optimizer)
        if self._hook is not None:
            self._hook.remove()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        parameters.sort(key=lambda parameter: parameter.grad is None)  # parameters with gradients come first
        if parameters:
            this = weakref.ref(self)

            def accumulated(_: torch.Tensor) -> None:
                if (loop := this()) is not None:
                    loop.ran_backward()

            # A hook on the gradient would also count `torch.autograd.grad` over parameters, which is not a micro-step.
            self._hook = parameters[0].register_post_accumulate_grad_hook(accumulated)

    def ran_backward(self) -> None:
        """Count a backward pass that has reached the optimizer's parameters."""
        self._backwards += 1
        self._sees_backwards = True
        if self._stepped:  # the optimizer steps during the pass, or another network's pass follows
            self._recorder.timer.forget_optimizer()
        if self._last is not None and self._last not in self._training:
            self._evaluated = False  # the script trains on the other loader's batch

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Process a step of `optimizer`."""
        if not self._run.active or not self._is_followed(optimizer):
            return
        self._steps += 1
        if self._steps == _SAY_AFTER and self._recorder.leads:
            self._say_what_is_not_seen()
        if self._evaluated:
            self._begin_again()
            return
        self._stepped = True
        self._steps_of_batch += 1
        self._learn_loaders()
        ended = self._ended
        if not self._loads:
            self._recorder.measure_whole_batches("no batch comes from a DataLoader")
        if not self._loads or self._ahead or ended:
            # After the loader is exhausted, one more step may follow, for example on a prefetched batch.
            self._boundary()
            if ended:
                self._leave_loop()
            elif not self._loads:
                self._batch_comes_unseen()
        elif self._steps_of_batch > self._usual_steps:
            if self._steps_of_batch == self._usual_steps + 1:  # the boundary between these steps was not observed
                self._replaying = self._recorder.launch.run_id
                self._size = self._recorder.local_batch_size or self._size
                self._begin_again()
            else:
                self._boundary()
            self._batch_comes_unseen()

    def _batch_comes_unseen(self) -> None:
        self._run.batch_arrived(torch.empty(self._size, 0, device="cpu"))

    def _is_followed(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._optimizer() is optimizer:
            if self._steps_of_others:
                self._steps_of_others.clear()
            return True
        # Count each optimizer separately: a script may have one per layer, and each steps once per training step.
        self._steps_of_others[id(optimizer)] += 1
        if self._optimizer() is None or self._steps_of_others[id(optimizer)] >= _FOLLOW_AFTER:
            self._follow(optimizer)  # training has entered another phase
        return False

    def _learn_loaders(self) -> None:
        """Determine which loaders belong to training, and which of them determines the size of a step."""
        if self._last is None or not self._sizes:
            return
        if self._last not in self._recent:
            self._recent.append(self._last)
        if self._training and self._last not in self._training:
            self._recorder.measure_whole_batches("training batches come from different loaders")
        settled = self._main in self._training and self._main in self._sizes
        self._training = {*self._recent, *(self._asked_before & self._sizes.keys())}
        self._asked_before = set(self._sizes)
        if not settled:
            configured = self._recorder.local_configured
            self._main = next((key for key, size in self._sizes.items() if size == configured), self._last)
            self._size, self._batches = self._sizes[self._main], self._counts[self._main]
        self._sizes.clear()
        self._counts.clear()

    def wants_batch(self, iterator: Any) -> None:
        """Process the script's request for a batch from `iterator`."""
        if not self._measures():
            return
        if self._stepped:
            self._boundary()
        if self._is_training(iterator):
            self._loads, self._ended, self._replaying = True, False, None
            if self._steps_of_batch <= _MOST_STEPS_A_BATCH:
                self._usual_steps = max(self._usual_steps, self._steps_of_batch)
            self._steps_of_batch = 0
            unseen = not (self._batches or self._recorder.timer.between_steps)
            if self._evaluated or unseen or not self._runs:
                self._begin_again()
            self._recorder.timer.wanted()
        else:
            self._evaluated = True

    def has_batch(self, iterator: Any, batch: Any) -> Any:
        """Record that `iterator` has delivered `batch`, and return the part of `batch` that the script receives."""
        if not (self._measures() and torch.is_grad_enabled()):
            return batch
        key, sampler = self._key(iterator), index_sampler(iterator)
        trains, self._last = self._is_training(iterator), key
        self._counts[key] += 1
        if not trains:
            self._sizes[key] = self._recorder.sizes.of(batch, sampler) or self._size
            return batch
        if not self._ahead:
            caller = sys._getframe(2)  # the frame that called the iterator's `__next__`
            self._ahead = str(caller.f_globals.get("__name__")).partition(".")[0] == _AHEAD
            if self._ahead:
                because = "the framework prefetches batches"
                self._recorder.measure_whole_batches(because)
        batch = self._recorder.cut(batch, sampler)
        stated = sampler if self._recorder.launch.cut_to is None else None
        size = self._sizes[key] = self._recorder.sizes.of(batch, stated) or self._size
        if key == self._main or (self._main is None and self._recorder.local_configured in (None, size)):
            self._size = size
            self._batches += 1
            self._recorder.uses_workers(loader_workers(iterator))
            self._run.batch_arrived(batch, sampler)
        else:
            self._recorder.timer.waited()
        return batch

    def ended(self, iterator: Any) -> None:
        """Record that `iterator` has no more batches."""
        if self._measures() and self._is_training(iterator):
            self._ended, self._runs = True, False

    def _measures(self) -> bool:
        return self._run.active and threading.current_thread() is threading.main_thread()

    def _is_training(self, iterator: Any) -> bool:
        return torch.is_grad_enabled() and (not self._training or self._key(iterator) in self._training)

    def _key(self, iterator: Any) -> int:
        """Return the number of the loader's dataset; datasets are numbered in the order in which the script first used
        them.

        All iterators over a loader have the same number in every epoch. The dataset's `id` cannot serve as its number,
        because a new dataset may by chance get the `id` of a deleted one. A rank on which this happened would confuse
        two loaders, and would not end at the same step as the other ranks. So a number is discarded when its dataset is
        deleted. A list, which does not allow a weak reference, is kept alive while it is among the `_LISTS_HELD` most
        recently used.
        """
        dataset = getattr(iterator, "_dataset", iterator)
        identity, numbers = id(dataset), self._numbers
        if identity not in numbers:
            reference: Any = None
            try:
                reference = weakref.ref(dataset, lambda _: numbers.pop(identity, None))
            except TypeError:
                self._lists[identity] = dataset
                if len(self._lists) > _LISTS_HELD:
                    oldest = next(iter(self._lists))
                    del self._lists[oldest], numbers[oldest]
            numbers[identity] = next(self._next_number), reference
        elif identity in self._lists:
            self._lists[identity] = self._lists.pop(identity)
        return numbers[identity][0]

    def _micro_steps(self) -> int:
        """Return the number of micro-steps in the step that is ending."""
        usual, batches, backwards = self._recorder.timer.grad_accum_steps, self._batches, self._backwards
        replays = self._loads and not batches and self._steps_of_batch > self._usual_steps
        if backwards == usual or replays or not (batches or backwards):
            return usual  # with prefetching, fewer batches may be observed in a step than it has
        return min(batches, backwards) or max(batches, backwards)

    def _boundary(self) -> None:
        """End the current step; if a profiling run has measured enough, end the script on all ranks after the same
        step.

        A script that can't be ended at this step continues to train without measurement until the launcher ends it.
        """
        self._recorder.timer.stepped_after(self._micro_steps(), self._size)
        self._run.batch_done()
        self._forget_step()
        self._runs = True
        replayed = self._replaying not in (None, self._recorder.launch.run_id)  # the next batch can't be cut
        if not (self._run.stopping or replayed):
            return
        if self._joins or self._left:
            self._run.finish()
            return
        self._left = True
        time.sleep(GLOO_RELEASE_S)  # before the exception unwinds the script's frames, which destroys the model
        raise SystemExit(0)

    def _leave_loop(self) -> None:
        """Discard the current step, and stop measuring until the next training batch."""
        self._run.end_loop()
        self._forget_step()

    def _begin_again(self) -> None:
        """Discard the measurements of the current step, and begin a new step now."""
        if not self._recorder.timer.between_steps:
            self._leave_loop()
        self._run.batch_done()
        self._forget_step()
        self._runs = True

    def _forget_step(self) -> None:
        self._stepped = self._runs = self._evaluated = self._ended = False
        self._batches = self._backwards = 0

    def _say_what_is_not_seen(self) -> None:
        missing = [] if self._loads else ["the batches, since no DataLoader yields them (their size is assumed)"]
        if not self._loads and not self._sees_backwards:
            missing.append("gradient accumulation (if there is any, call tula_agent.init(grad_accum_steps=...))")
        if not self._models and current_group() is not None and torch.distributed.get_world_size() > 1:
            missing.append("communication, since no DistributedDataParallel model contains the optimizer's parameters")
        if missing:
            logger.warning("without a tula_agent.init() in the script, the agent cannot see %s", ", and ".join(missing))
        if self._joins:
            logger.warning(
                "under model.join() ranks can take different numbers of steps, so they can't end after the same step. "
                "Only the first rank's steps are measured, and the script continues to train until tula ends it. "
                "To end it earlier, loop over run.steps(loader) (see docs/embed.md)."
            )


_config = read_config() if is_launched() else None
_waits_for_group = _config is not None and _config.world_size > 1
_run: Run | None = None
_loop: UneditedLoop | None = None


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Process a step of `optimizer`; the first step after the process group is created starts the run."""
    global _run, _loop
    if threading.current_thread() is not threading.main_thread():
        return
    if _loop is not None:
        _loop.stepped(optimizer)
    elif _run is None and (not _waits_for_group or current_group() is not None):
        _run = init()
        if _run.recorder is not None and _run.active:
            _loop = UneditedLoop(_run, _run.recorder, optimizer)


def _see_batches(loop: UneditedLoop, guard: Guard) -> None:
    """Let `loop` observe every batch of every DataLoader, even of one over which the script is already iterating."""
    kind = loader_iterator_class()
    if kind is None:
        return
    fetch = kind.__next__

    def seen(iterator: Any) -> Any:
        with guard("seeing batches"):
            loop.wants_batch(iterator)
        try:
            batch = fetch(iterator)
        except StopIteration:
            with guard("seeing batches"):
                loop.ended(iterator)
            raise
        with guard("seeing batches"):
            return loop.has_batch(iterator, batch)
        return batch  # reached after an exception, which the guard has logged

    kind.__next__ = seen
