"""Measures a training loop that does not use the agent, through its optimizer's steps and its data loader."""

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
"""The framework whose loader fetches one batch ahead of the current one; transformers' Trainer uses it too."""
_SAY_AFTER = 3
"""Steps after which the loop logs what it cannot observe."""
_MOST_STEPS_A_BATCH = 8
"""Most optimizer steps on one batch (a GAN's critic takes several); a script with more is assumed to request no
batches.
"""
_LOADERS_KEPT = 8
_LISTS_HELD = 2
"""Most lists to keep alive, since lists allow no weak references; scripts train on one list and evaluate on another."""
_FOLLOW_AFTER = 32
"""Number of consecutive steps of another optimizer that end the watched optimizer's phase."""


class UneditedLoop:
    """Drives a `Run` as `Run.steps` does, by watching the script request batches, run backward passes and step.

    The loop begins after the first step of an optimizer, once the process group exists. It watches only the main
    thread, since a profiling run could not end the script from another thread.

    The optimizer's step completes a step of training. The step ends when the script then requests a batch, so that work
    between two steps counts. It ends at the optimizer's step if the script requests no batch (it has no DataLoader, or
    `itertools.cycle` keeps the batches) or a framework fetches batches ahead. All loaders that the script uses at every
    step belong to training; the loader whose batches have the run's size determines the size of a step. Batches without
    gradients are an evaluation, and so are batches of another loader if no backward pass follows before the next batch
    of training. An evaluation does not belong to any step.

    A step has as many micro-steps as backward passes or batches, whichever is fewer: a GAN makes several passes over
    one batch, and the first rank of some frameworks fetches batches for the others. A launch that measures several
    batch sizes cuts batches as a loader delivers them, but not under a framework that fetches ahead.
    """

    def __init__(self, run: Run, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._recorder = run, recorder
        self._steps = 0
        self._steps_of_others: Counter[int] = Counter()  # by identity, since the last step of the watched one
        self._left = False
        self._size = recorder.config.local_batch_size or 1
        self._numbers: dict[int, tuple[int, Any]] = {}  # by a dataset's identity, with a weak reference
        self._lists: dict[int, Any] = {}  # datasets without one, by identity, the last used last
        self._next_number = count()
        # By a loader's `_key`: how many batches it has given since the last step, and the size of the last one.
        self._counts: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._asked_before: set[int] = set()  # in the step before
        self._last: int | None = None
        self._recent: deque[int] = deque(maxlen=_LOADERS_KEPT)  # loaders whose batch came last before a step
        self._training: set[int] = set()
        self._main: int | None = None  # the loader of training whose batches have the size that counts
        # Since the last end of a step.
        self._stepped = False
        self._runs = False  # the step's clock
        self._evaluated = False
        self._batches = self._backwards = 0
        self._ended = False  # True: the loader of training has ended, and no step has come since
        self._ahead = False  # a framework fetches one batch ahead
        self._steps_of_batch, self._usual_steps = 0, 1  # steps since a loader was asked, and the most of them so far
        self._replaying: str | None = None  # the run whose batches the script keeps and takes again
        self._sees_backwards = False
        objects = gc.get_objects()  # some tens of milliseconds, once
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
            recorder.measure_alone("ranks step unequally often under model.join()")
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
        parameters.sort(key=lambda parameter: parameter.grad is None)  # first those that backward passes reach
        if parameters:
            this = weakref.ref(self)

            def accumulated(_: torch.Tensor) -> None:
                if (loop := this()) is not None:
                    loop.ran_backward()

            # This is not a hook on the gradient, because `torch.autograd.grad` over parameters is not a micro-step.
            self._hook = parameters[0].register_post_accumulate_grad_hook(accumulated)

    def ran_backward(self) -> None:
        """Count a backward pass that has reached the optimizer's parameters."""
        self._backwards += 1
        self._sees_backwards = True
        if self._stepped:  # the optimizer steps within the pass, or the pass is another network's: no time of its own
            self._recorder.timer.forget_optimizer()
        if self._last is not None and self._last not in self._training:
            self._evaluated = False  # the other loader's batch is trained on

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of `optimizer`."""
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
            # After the loader's end, a loader that is one batch ahead has its last step, or the script takes one more.
            self._boundary()
            if ended:
                self._leave_loop()
            elif not self._loads:
                self._batch_comes_unseen()
        elif self._steps_of_batch > self._usual_steps:
            if self._steps_of_batch == self._usual_steps + 1:  # these steps could not be told apart
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
        # Count by optimizer: a script may have one for each layer, and all step between two steps of the watched one.
        self._steps_of_others[id(optimizer)] += 1
        if self._optimizer() is None or self._steps_of_others[id(optimizer)] >= _FOLLOW_AFTER:
            self._follow(optimizer)  # another phase of the training
        return False

    def _learn_loaders(self) -> None:
        """Determine which loaders belong to training, and which of these shows the size of a step."""
        if self._last is None or not self._sizes:
            return
        if self._last not in self._recent:
            self._recent.append(self._last)
        if self._training and self._last not in self._training:
            self._recorder.measure_whole_batches("batches come from one loader after another")
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
        """Note that the script requests a batch from `iterator`."""
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
        """Note that `iterator` has delivered `batch`, and return the part of it that the script gets."""
        if not (self._measures() and torch.is_grad_enabled()):
            return batch
        key, sampler = self._key(iterator), index_sampler(iterator)
        trains, self._last = self._is_training(iterator), key
        self._counts[key] += 1
        if not trains:
            self._sizes[key] = self._recorder.sizes.of(batch, sampler) or self._size
            return batch
        if not self._ahead:
            caller = sys._getframe(2)  # of this method, of the iterator's `__next__`, of who called that
            self._ahead = str(caller.f_globals.get("__name__")).partition(".")[0] == _AHEAD
            if self._ahead:
                because = "the framework fetches a batch ahead of the one that is trained on"
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
        """Note that `iterator` has no more batches."""
        if self._measures() and self._is_training(iterator):
            self._ended, self._runs = True, False

    def _measures(self) -> bool:
        return self._run.active and threading.current_thread() is threading.main_thread()

    def _is_training(self, iterator: Any) -> bool:
        return torch.is_grad_enabled() and (not self._training or self._key(iterator) in self._training)

    def _key(self, iterator: Any) -> int:
        """Return the number of the loader's dataset, in the order in which the script first used its datasets.

        All iterators over a loader share the number in every epoch. The dataset's identity (`id`) cannot be used,
        because a new dataset may by chance get the identity of a deleted one. A rank on which that happens would
        confuse two loaders, and would not end at the same step as the others. So a number is forgotten with its
        dataset. A list, which does not allow a weak reference, is kept alive while it is among the last `_LISTS_HELD`
        used.
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
        """Return the number of micro-steps in the step that ends."""
        usual, batches, backwards = self._recorder.timer.grad_accum_steps, self._batches, self._backwards
        replays = self._loads and not batches and self._steps_of_batch > self._usual_steps
        if backwards == usual or replays or not (batches or backwards):
            return usual  # where batches are fetched ahead, a step may show fewer than it has
        return min(batches, backwards) or max(batches, backwards)

    def _boundary(self) -> None:
        """End the current step; if a profiling run has measured enough, leave the script on all ranks after the same
        step.

        A script that can't be left in this way continues to train unmeasured until the launcher ends it.
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
        time.sleep(GLOO_RELEASE_S)  # the script's frames destroy the model
        raise SystemExit(0)

    def _leave_loop(self) -> None:
        """Drop the current step, and measure nothing until the next batch of training."""
        self._run.end_loop()
        self._forget_step()

    def _begin_again(self) -> None:
        """Drop the measurements of this step, and begin a new step now."""
        if not self._recorder.timer.between_steps:
            self._leave_loop()
        self._run.batch_done()
        self._forget_step()
        self._runs = True

    def _forget_step(self) -> None:
        self._stepped = self._runs = self._evaluated = self._ended = False
        self._batches = self._backwards = 0

    def _say_what_is_not_seen(self) -> None:
        missing = [] if self._loads else ["the batches, which come from no DataLoader (their size is the run's)"]
        if not self._loads and not self._sees_backwards:
            missing.append("accumulation: call tula_agent.init(grad_accum_steps=...) if the script accumulates")
        if not self._models and current_group() is not None and torch.distributed.get_world_size() > 1:
            missing.append("communication, since no DistributedDataParallel model holds the optimizer's parameters")
        if missing:
            logger.warning("the script calls no tula_agent.init(), so the agent cannot see %s", ", and ".join(missing))
        if self._joins:
            logger.warning(
                "under model.join() ranks step unequally often and can't end after the same step: the first rank's "
                "steps are measured, and the script trains on until tula ends it; to end early loop over "
                "run.steps(loader), see docs/embed.md"
            )


_config = read_config() if is_launched() else None
_waits_for_group = _config is not None and _config.world_size > 1
_run: Run | None = None
_loop: UneditedLoop | None = None


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """Note a step of `optimizer`; the first step after the process group exists begins the run."""
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
    """Let `loop` observe every batch of every DataLoader, even if the script is already iterating over it."""
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
