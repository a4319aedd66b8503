"""A training's place in its data, and checkpoints: stopped at any step, it continues as if it had not been stopped.

A checkpoint is a folder `step-<number>` below TULA_CHECKPOINT_DIR, or `step-<number>.<n>` if it is the n-th of a step:

    training.pt       model, optimizer (with the state of gradient scaling), scheduler, GradScaler, the script's extra
    shards/           instead of the first two when the model is sharded (torch.distributed.checkpoint)
    rank-<r>.pt       of each rank: its position in the data and its random number generators
    complete.json     written last; a folder without it is never read

On CPU a resumed run is bit for bit the run that was not stopped, if configuration and script are the same. A failure on
one rank, in writing or reading, raises the same `CheckpointError` on all ranks, and no rank waits for another for ever.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from tula_agent.guard import logger
from tula_agent.torch_private import is_sharded

T = TypeVar("T")

KEEP: Final = 2
"""Complete checkpoints that are kept; older ones are deleted once a newer one is complete."""

_COMPLETE: Final = "complete.json"
_NAME: Final = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")
_LONGEST: Final = 2000  # characters of an error that are sent to the other ranks


@dataclass
class Position:
    """Epochs that are complete, and batches consumed of the one under way.

    `step` counts micro-steps from the start of training. `epochs_before` is the progress of earlier processes in
    epochs, which do not depend on the batch size; `known` is True once the script or `resume` has set it.
    `at_epoch_start`: the random state when the epoch under way began. `pending`: the next epoch is to begin as an
    interrupted one did: batches to skip, its random state at the start, and that after them.
    """

    epoch: int = 0
    consumed: int = 0
    step: int = 0
    epochs_before: float = 0.0
    known: bool = False
    at_epoch_start: dict[str, Any] = field(default_factory=dict)
    loader: Any = None
    pending: tuple[int, dict[str, Any], dict[str, Any] | None] | None = None

    def begin(self, loader: Iterable[T]) -> Iterator[T]:
        """An iterator over `loader` from the current position."""
        pending, self.pending, self.loader = self.pending, None, loader
        if pending is None:
            self.at_epoch_start, self.consumed = _captured(loader), 0
            return iter(loader)
        consumed, self.at_epoch_start, now = pending
        if self.at_epoch_start and now is not None:
            restore_randomness(self.at_epoch_start, loader)
        batches = iter(loader)
        self.consumed = sum(1 for _ in islice(batches, consumed))
        self.known = True
        self.epochs_before = self.epoch + _share(self.consumed, loader)
        if now is not None:
            restore_randomness(now, loader)
        return batches

    def end(self) -> None:
        """The epoch is over, or was left."""
        self.epoch += 1
        self.consumed, self.at_epoch_start = 0, {}


def _captured(loader: Any) -> dict[str, Any]:
    """Empty where a generator cannot be read: only writing a checkpoint may fail for that."""
    try:
        return capture_randomness(loader)
    except Exception as error:
        logger.info("random numbers cannot be read, so a resumed run may draw others: %r", error)
        return {}


def _share(batches: int, loader: Iterable[Any]) -> float:
    """So many batches as a share of an epoch; 0 for a loader without a length."""
    try:
        return min(1.0, batches / len(loader))  # type: ignore[arg-type]
    except Exception:  # a loader's own __len__ may raise anything
        return 0.0


def _generators(loader: Any) -> list[torch.Generator]:
    """The loader's own generators; samplers often share the loader's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    unique = {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}
    return list(unique.values())


def capture_randomness(loader: Any = None) -> dict[str, Any]:
    """The state of every generator that a step may draw from: torch (CPU, CUDA), NumPy, Python, the loader's own."""
    version, words, gauss_next = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, *words, gauss_next]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == "MT19937":  # unless a script has replaced it
            keys, position = found["state"]["key"], found["state"]["pos"]
            gauss = int(found["has_gauss"]), float(found["gauss"])
            state["numpy"] = ["MT19937", [int(key) for key in keys], int(position), *gauss]
    state["loader"] = [generator.get_state() for generator in _generators(loader)]
    return state


def restore_randomness(state: dict[str, Any], loader: Any = None) -> None:
    """Restore what `capture_randomness` captured; generators that do not exist in this process are left out."""
    torch.set_rng_state(state["torch"])
    version, *words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))
    for generator, saved in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(saved)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The agent raises this one into training, since training depends on it."""


@dataclass(frozen=True)
class Resumed:
    """Where training continues: at batch `consumed` of epoch `epoch`, after `step` micro-steps.

    `run.steps` skips the consumed batches. `exact` is False when the configuration has changed since.
    """

    epoch: int = 0
    step: int = 0
    consumed: int = 0
    exact: bool = True
    found: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    position: Position,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: dict[str, Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint; every rank must call it at the same step. Returns its folder.

    `extra` is for the script's own state: numbers, text, tensors, lists and dictionaries of them. Raises
    `CheckpointError` on all ranks, without a directory or where one of them cannot write; earlier checkpoints are not
    changed, and what was written of this one is deleted.
    """
    ranks = CollectiveCalls(model)
    root = _root(ranks, directory)
    ranks.failing = f"no checkpoint of step {position.step} was written below {root}, the one before is still valid"
    ranks.remedy = "all ranks need the same directory, with room in it"
    folder = root / ranks.on_first(lambda: _new_folder(root, position.step).name)
    shards = _Shards(model, optimizer, folder) if is_sharded(model.parameters(), [model]) else None

    def write() -> None:
        objects = {"model": _unwrapped(model), "optimizer": optimizer} if shards is None else {}
        objects |= {"scheduler": scheduler, "scaler": scaler}
        whole = {name: part.state_dict() for name, part in objects.items() if part is not None}
        whole["extra"] = extra or {}
        if ranks.rank == 0:
            _replace(folder / "training.pt", lambda path: torch.save(whole, path))
        own = {
            "epoch": position.epoch,
            "step": position.step,
            "consumed": position.consumed,
            "at_pass_start": position.at_epoch_start,  # the stored name
            "now": capture_randomness(position.loader),
        }
        _replace(folder / f"rank-{ranks.rank}.pt", lambda path: torch.save(own, path))

    facts = json.dumps({"step": position.step, **_shape(ranks, position.loader)})
    try:
        for part in (write, *((shards.gather, shards.write) if shards else ())):
            ranks.on_each(part)
        ranks.on_first(lambda: _replace(folder / _COMPLETE, lambda path: path.write_text(facts)))
    except CheckpointError:
        if ranks.rank == 0:
            _delete(folder)
        raise
    if ranks.rank == 0:
        _delete_superseded(folder)
    return folder


def resume(
    position: Position,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    directory: str | os.PathLike[str] | None = None,
) -> Resumed:
    """Load the newest complete checkpoint, if any; every rank must call it, after everything is built.

    Loop over `range(resumed.epoch, epochs)` afterwards. After a change of batch or ranks the position in the data is
    kept in examples, and the random numbers start afresh. Raises `CheckpointError` on all ranks when the checkpoint
    does not fit, or cannot be read on one of them. Then weights and buffers are on all ranks what they were before, as
    is the optimizer where it does not fit. Shards, and what is loaded before a part that fails (optimizer, scheduler,
    GradScaler, in this order), stay loaded: do not train on after that.
    """
    ranks = CollectiveCalls(model)
    root = _root(ranks, directory)
    ranks.failing, ranks.remedy = f"checkpoints below {root} cannot be listed", "let all ranks read that directory"
    # The first rank's newest, on all ranks: they may look at different moments.
    name = ranks.on_first(lambda: next((path.name for path in reversed(_complete(root))), None))
    position.known = True
    if name is None:
        return Resumed()
    folder = root / name
    ranks.failing = f"the checkpoint {folder} does not fit this script or cannot be read"
    ranks.remedy = "delete it, undo the change, or let all ranks read it"

    def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        facts = json.loads((folder / _COMPLETE).read_text())
        own = folder / f"rank-{min(ranks.rank, facts['world_size'] - 1)}.pt"
        return facts, _load(folder / "training.pt"), _load(own)

    facts, whole, own = ranks.on_each(read)

    def load(name: str, part: Any) -> None:
        if part is not None and whole.get(name) is not None:
            part.load_state_dict(whole[name])

    if "model" not in whole:
        shards = _Shards(model, optimizer, folder)
        for step in (shards.gather, shards.read, shards.apply):
            ranks.on_each(step)
    objects = {"model": _unwrapped(model), "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    before = ranks.on_each(lambda: _copied(model) if "model" in whole else [])
    shape = _shape(ranks, loader)
    with _unchanged_by_failure(before):
        for each in objects.items():
            ranks.on_each(partial(load, *each))
        resumed = ranks.on_each(lambda: _restore_position(position, facts, own, shape, loader, whole["extra"]))
    if not resumed.exact:
        logger.warning(
            "resumed with another batch size or world size: the data continues at the same example, shuffled"
        )
    return resumed


def _copied(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and buffers, each with its present value in the host's memory."""
    return [(t, t.detach().to("cpu", copy=True)) for t in (*model.parameters(), *model.buffers())]


@contextmanager
def _unchanged_by_failure(before: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Restores these values after an exception: torch loads weights that fit before it raises for the others."""
    try:
        yield
    except Exception:
        with torch.no_grad():
            for tensor, value in before:
                if not torch.equal(tensor.cpu(), value):  # an expanded buffer takes no copy, and none was loaded
                    tensor.copy_(value)
        raise


def _restore_position(
    position: Position,
    facts: dict[str, Any],
    own: dict[str, Any],
    shape: dict[str, Any],
    loader: Any,
    extra: dict[str, Any],
) -> Resumed:
    """Continue where this rank's file (`own`) ends; `shape`: batch and world size now, those of then are in `facts`."""
    exact = all(facts[name] == size or size is None for name, size in shape.items())
    consumed = own["consumed"]
    if not exact:  # as many examples
        before = facts["local_batch_size"] or 1
        after = (shape["local_batch_size"] or before) * shape["world_size"]
        consumed = int(consumed * before * facts["world_size"] // after)
    position.epoch, position.step = own["epoch"], own["step"]
    position.epochs_before = float(own["epoch"])
    if exact:
        restore_randomness(own["now"], loader)
    if own["consumed"]:
        position.pending = (consumed, own["at_pass_start"], own["now"] if exact else None)
    return Resumed(own["epoch"], own["step"], consumed, exact, True, extra)


def _root(ranks: CollectiveCalls, directory: str | os.PathLike[str] | None) -> Path:
    ranks.failing, ranks.remedy = "no checkpoint directory", "set TULA_CHECKPOINT_DIR or pass directory="
    name = directory or os.environ.get("TULA_CHECKPOINT_DIR")

    def named() -> Path:
        if not name:
            raise LookupError("none is given")
        return Path(name)

    return ranks.on_each(named)


def _load(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(path, map_location="cpu", weights_only=True))


def _shape(ranks: CollectiveCalls, loader: Any) -> dict[str, Any]:
    size = getattr(loader, "batch_size", None) if loader is not None else None
    if not isinstance(size, int):
        text = os.environ.get("TULA_LOCAL_BATCH_SIZE", "")
        size = int(text) if text.isdigit() else None
    return {"world_size": ranks.size, "local_batch_size": size}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, so that a checkpoint loads with and without it."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, torch.nn.Module)
    return inner


class CollectiveCalls:
    """Calls that every rank training `model` makes in the same order, and that succeed or fail on all of them.

    Each method raises `CheckpointError` on all ranks with one sentence, "`failing` (rank, error): `remedy`", that of
    the first rank that failed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if distributed else 0
        self.size: int = dist.get_world_size() if distributed else 1
        self.failing = self.remedy = ""
        # NCCL moves objects over the current device, which a script may have left at the first one on every rank.
        device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
        self._on_device = nullcontext() if device is None else torch.cuda.device(device)

    def on_each(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank; returns its result on this one."""
        value, sentence, cause = None, None, None
        try:
            value = function()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}"[:_LONGEST].split())
            who = f"rank {self.rank}: " if self.size > 1 else ""
            sentence, cause = f"{self.failing} ({who}{text}): {self.remedy}", error
        sentences = [sentence]
        if self.size > 1:
            sentences = [None] * self.size
            with self._on_device:
                dist.all_gather_object(sentences, sentence)
        for each in sentences:
            if each is not None:
                raise CheckpointError(each) from cause
        return cast("T", value)

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank only; returns its result on every rank (pickled, so keep it small)."""
        values: list[T | None] = [self.on_each(lambda: function() if self.rank == 0 else None)]
        if self.size > 1:
            with self._on_device:
                dist.broadcast_object_list(values, src=0)
        return cast("T", values[0])


class _Shards:
    """Model and optimizer of this rank's part of a sharded model, in torch's own format below `folder`.

    Every rank calls the methods in the same order, each only if the one before succeeded on all ranks: they contain
    collectives of torch, in which a rank that failed before would leave the others waiting. Factors of gradient scaling
    are not among the state, and are estimated again.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, folder: Path) -> None:
        self._model = model
        self._optimizer = () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
        self._path = str(folder / "shards")
        self._state: dict[str, Any] = {}

    def gather(self) -> None:
        """Take the state as it is; reading needs it too, and fills it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._state["model"], self._state["optimizer"] = get_state_dict(self._model, self._optimizer)

    def write(self) -> None:
        """Write what was gathered."""
        from torch.distributed.checkpoint.state_dict_saver import save

        self._transfer(save)

    def read(self) -> None:
        """Read into what was gathered."""
        from torch.distributed.checkpoint.state_dict_loader import load

        self._transfer(load)

    def apply(self) -> None:
        """Load what was read into the model and the optimizer."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def _transfer(self, function: Callable[..., Any]) -> None:
        """Raise RuntimeError with the first rank's cause: torch's own is no `Exception`, with every rank's stack."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            function(self._state, checkpoint_id=self._path)
        except CheckpointException as error:
            rank, (cause, *_) = next(iter(error.failures.items()))
            raise RuntimeError(f"the shard of rank {rank}: {type(cause).__name__}: {cause}") from error


def _new_folder(root: Path, step: int) -> Path:
    """An empty folder below `root` for a checkpoint of `step`; an unfinished one of that name is deleted.

    Its name is newer than that of every complete checkpoint of the same step.
    """
    number = 1 + max((age for of, age in map(_age, _complete(root)) if of == step), default=0)
    folder = root / (f"step-{step:010d}" if number == 1 else f"step-{step:010d}.{number}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _delete_superseded(folder: Path) -> None:
    """Now that `folder` is complete, keep only the newest of each of the last KEEP steps, and no older unfinished one.

    A failure must not end the training.
    """
    try:
        found = _complete(folder.parent)
        last_of_step = list({_age(path)[0]: path for path in found}.values())
        kept = {folder, *last_of_step[-KEEP:]}
        unfinished = [path for path in _all(folder.parent) if path not in found and _age(path) < _age(folder)]
        for path in [*(path for path in found if path not in kept), *unfinished]:
            _delete(path)
    except Exception as error:
        logger.warning("old checkpoints besides %s were not deleted: %r", folder, error)


def _delete(folder: Path) -> None:
    """Delete what can be deleted; the mark of completeness first, since the process may be killed in between."""
    try:
        (folder / _COMPLETE).unlink(missing_ok=True)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def _replace(path: Path, fill: Callable[[Path], object]) -> None:
    """Write to another name, fsync, then rename: a crash leaves no half file under `path`."""
    new = path.with_name(f".{path.name}.new")
    fill(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


def _all(root: Path) -> list[Path]:
    """All checkpoint folders, oldest first; copies under other names are ignored."""
    return sorted((path for path in root.glob("step-*") if _NAME.fullmatch(path.name)), key=_age)


def _complete(root: Path) -> list[Path]:
    return [path for path in _all(root) if (path / _COMPLETE).exists()]


def _age(folder: Path) -> tuple[int, int]:
    """Step, and number among the checkpoints of that step."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
