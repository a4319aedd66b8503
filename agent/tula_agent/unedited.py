"""Measures a training loop that has never heard of the agent, from its optimizer's steps and its data loader."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tula_agent.batches import batch_size_of
from tula_agent.config import is_launched, read_config
from tula_agent.guard import Guard, logger
from tula_agent.rank_channel import current_group
from tula_agent.run import GLOO_RELEASE_S, Run, init
from tula_agent.torch_private import loader_iterator_class

if TYPE_CHECKING:
    from tula_agent.recorder import Recorder

_AHEAD = ("accelerate", "lightning", "pytorch_lightning")
"""Frameworks whose loaders fetch a batch ahead of the one that is trained on; the Trainer uses accelerate's."""
_SAY_AFTER = 3
"""Steps after which it is known what can't be seen."""


class UneditedLoop:
    """Drives a `Run` as `Run.steps` does: a step ends where the loop asks its loader for the batch after it.

    Begins after the first step of an optimizer, once the process group exists. Where no batch comes from a DataLoader,
    a step ends where the optimizer's step does. The loader of training is the one whose batch came last before a
    step; another one's batches (an evaluation) belong to no step. Other threads than the main one are left alone: the
    end of a profiling run could not end the script from there.

    Some frameworks (accelerate, and with it the Hugging Face Trainer) fetch a batch while the one before it is trained
    on. Such a loader's last step comes after its end, and the first batch of its next epoch is one too many. A launch
    that is to measure several batches cuts them as the loader hands them out, but not where such a framework is loaded.
    """

    def __init__(self, run: Run, recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
        self._run, self._recorder = run, recorder
        self._optimizer = weakref.ref(optimizer)
        self._fetched = False
        self._last: int | None = None
        self._training: int | None = None
        self._steps = 0
        self._left = False
        self._ended = False  # the loader of training, and no step has come since
        self._ahead = False  # its framework fetches one batch ahead
        self._withheld = False  # the next batch is that one
        self._micro_steps = 0
        self._batch_size = 1
        models = _ddp_models_of(optimizer)
        self._models = len(models)
        run.watch(models, optimizer)
        run.begin_loop(cuts=True)
        _see_batches(self, run.guard)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped."""
        if not self._run.active or self._optimizer() is not optimizer:
            return
        self._training = self._last
        self._steps += 1
        if self._steps == _SAY_AFTER and self._recorder.leads:
            self._say_what_is_not_seen()
        if not self._fetched:
            self._recorder.measure_whole_batches("no batch comes from a DataLoader")
            self._boundary()
            self._run.batch_arrived(torch.empty(self._recorder.config.local_batch_size or 1, 0, device="cpu"))
        elif self._ended:
            # The last step of an epoch, of a loader that is a batch ahead or of a script that steps once more.
            self._ended = False
            self._ahead = self._ahead or self._micro_steps + 1 == self._recorder.timer.grad_accum_steps
            if self._ahead:
                self._run.batch_arrived(torch.empty(self._batch_size, 0, device="cpu"))
            self._withheld = self._ahead
            self._boundary()
            self._run.end_loop()
        self._micro_steps = 0

    def wants_batch(self, iterator: Any) -> None:
        """The script asks `iterator` for a batch."""
        if self._measures():
            self._fetched = True
            if self._ended:
                self._ended = self._ahead = False
                self._run.end_loop()
            self._boundary()
            if not self._is_training(iterator):
                self._run.end_loop()

    def has_batch(self, iterator: Any, batch: Any) -> Any:
        """`iterator` has delivered; returns what the script gets of `batch`."""
        if not self._measures():
            return batch
        self._last = _key(iterator)
        if not self._is_training(iterator):
            return batch
        if self._recorder.sweep.cut_to is not None:
            caller = sys._getframe(2)  # of this method, of the iterator's `__next__`, of who called that
            if str(caller.f_globals.get("__name__")).partition(".")[0] in _AHEAD:
                because = "the framework fetches a batch ahead of the one that is trained on"
                self._recorder.measure_whole_batches(because)
        batch = self._run.cut(batch)
        self._batch_size = batch_size_of(batch) or self._batch_size
        if self._withheld:
            self._withheld = False
        else:
            self._micro_steps += 1
            self._run.batch_arrived(batch)
        return batch

    def ended(self, iterator: Any) -> None:
        """`iterator` has no more batches."""
        if self._measures():
            self._ended = self._is_training(iterator)
            if not self._ended:
                self._run.end_loop()

    def _measures(self) -> bool:
        return self._run.active and threading.current_thread() is threading.main_thread()

    def _is_training(self, iterator: Any) -> bool:
        return torch.is_grad_enabled() and self._training in (None, _key(iterator))

    def _boundary(self) -> None:
        """End the step under way. A profiling run that has enough leaves the script, all ranks after the same step."""
        self._run.batch_done()
        if self._run.stopping and not self._left:
            self._left = True
            time.sleep(GLOO_RELEASE_S)  # the script's frames destroy the model
            raise SystemExit(0)

    def _say_what_is_not_seen(self) -> None:
        missing = [] if self._fetched else ["the batches, which come from no DataLoader (their size is the run's)"]
        if not self._models and current_group() is not None and torch.distributed.get_world_size() > 1:
            missing.append("communication, since no DistributedDataParallel model holds the optimizer's parameters")
        if missing:
            logger.warning("the script calls no tula_agent.init(), and not seen is %s", ", and ".join(missing))


_config = read_config() if is_launched() else None
_waits_for_group = _config is not None and _config.world_size > 1
_run: Run | None = None
_loop: UneditedLoop | None = None


def stepped(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer` has stepped; the first that does so once the process group exists begins the run."""
    global _run, _loop
    if threading.current_thread() is not threading.main_thread():
        return
    if _loop is not None:
        _loop.stepped(optimizer)
    elif _run is None and (not _waits_for_group or current_group() is not None):
        _run = init()
        if _run.recorder is not None and _run.active:
            _loop = UneditedLoop(_run, _run.recorder, optimizer)


def _key(iterator: Any) -> int:
    """Equal for the iterators of one loader in all epochs: the identity of its dataset."""
    return id(getattr(iterator, "_dataset", iterator))


def _ddp_models_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The DDP models that hold the optimizer's parameters; once, some tens of milliseconds."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wrapper = torch.nn.parallel.DistributedDataParallel
    found = [one for one in gc.get_objects() if issubclass(type(one), wrapper)]
    return [model for model in found if any(id(parameter) in wanted for parameter in model.parameters())]


def _see_batches(loop: UneditedLoop, guard: Guard) -> None:
    """Let `loop` see every batch of every DataLoader, also of those that are being iterated over."""
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
            loop.ended(iterator)
            raise
        with guard("seeing batches"):
            return loop.has_batch(iterator, batch)
        return batch  # of an exception, which the guard has logged

    kind.__next__ = seen
