"""`run.checkpoint` and `run.resume`: a training stopped at any step continues as if it had not been stopped.

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
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from tula_agent.guard import logger
from tula_agent.position import Position, capture_randomness, restore_randomness
from tula_agent.torch_private import has_own_loading, has_plain_loading, is_sharded

T = TypeVar("T")

KEEP: Final = 2
"""Complete checkpoints that are kept; older ones are deleted once a newer one is complete."""

_COMPLETE: Final = "complete.json"
_NAME: Final = re.compile(r"step-([0-9]+)(?:\.([0-9]+))?")
_LONGEST: Final = 2000  # characters of an error that are sent to the other ranks
_SHARDS: Final = "shards"


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
    failing = f"no checkpoint of step {position.step} was written below {root}, the one before is still valid"
    remedy = "all ranks need the same directory, with room in it"
    folder = root / ranks.on_first(lambda: _new_folder(root, position.step).name, failing, remedy)
    parts = _save_parts(folder, model, optimizer) if is_sharded(model.parameters(), [model]) else []

    def write() -> None:
        whole: dict[str, Any] = {"extra": extra or {}}
        for name, part in (("scheduler", scheduler), ("scaler", scaler)):
            if part is not None:
                whole[name] = part.state_dict()
        if not parts:
            whole["model"] = _unwrapped(model).state_dict()
            whole["optimizer"] = None if optimizer is None else optimizer.state_dict()
        if ranks.rank == 0:
            _write(folder / "training.pt", whole)
        own = {
            "epoch": position.epoch,
            "step": position.step,
            "consumed": position.consumed,
            "at_pass_start": position.at_epoch_start,  # the stored name
            "now": capture_randomness(position.loader),
        }
        _write(folder / f"rank-{ranks.rank}.pt", own)

    facts = {"step": position.step, **_shape(ranks, position.loader)}
    try:
        for part in (write, *parts):
            ranks.on_each(part, failing, remedy)
        ranks.on_first(lambda: _seal(folder, facts), failing, remedy)
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
    does not fit, or cannot be read on one of them. Then no rank has changed anything if a file cannot be read, or if
    names and shapes of the weights or the optimizer's groups differ. Shards, and objects with their own loading (a
    model, an optimizer, a scheduler, a GradScaler), may be half loaded: do not train on after that.
    """
    ranks = CollectiveCalls(model)
    folder = _agreed_newest(ranks, _root(ranks, directory))
    position.known = True
    if folder is None:
        return Resumed()

    def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        facts = json.loads((folder / _COMPLETE).read_text())
        own = folder / f"rank-{min(ranks.rank, facts['world_size'] - 1)}.pt"
        return facts, _load(folder / "training.pt"), _load(own)

    facts, whole, own = ranks.on_each(read, *_unreadable(folder))
    ranks.on_each(
        lambda: _check_fit(whole, model, optimizer),
        f"the checkpoint {folder} does not fit this script",
        "delete it or undo the change",
    )
    parts = [] if "model" in whole else _load_parts(folder, model, optimizer)
    for part in (*parts, lambda: _load_whole(whole, model, optimizer, scheduler, scaler)):
        ranks.on_each(part, *_unreadable(folder))
    resumed = ranks.on_each(
        lambda: _restore_position(position, facts, own, _shape(ranks, loader), loader, whole["extra"]),
        *_unreadable(folder),
    )
    if not resumed.exact:
        logger.warning(
            "resumed with another batch size or world size: the data continues at the same example, shuffled"
        )
    return resumed


def _load_whole(whole: dict[str, Any], model: torch.nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> None:
    """Load what `training.pt` holds; a sharded model and its optimizer are not in it."""
    if "model" in whole:
        _unwrapped(model).load_state_dict(whole["model"])
        if optimizer is not None and whole["optimizer"] is not None:
            optimizer.load_state_dict(whole["optimizer"])
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None and name in whole:
            part.load_state_dict(whole[name])


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
    consumed = own["consumed"] if exact else _same_examples(own["consumed"], facts, shape)
    position.epoch, position.step = own["epoch"], own["step"]
    position.epochs_before = float(own["epoch"])
    if exact:
        restore_randomness(own["now"], loader)
    if own["consumed"]:
        position.restore(consumed, own["at_pass_start"], own["now"] if exact else None)
    return Resumed(own["epoch"], own["step"], consumed, exact, True, extra)


def _same_examples(consumed: int, then: dict[str, Any], now: dict[str, Any]) -> int:
    before = (then["local_batch_size"] or 1) * then["world_size"]
    after = (now["local_batch_size"] or then["local_batch_size"] or 1) * now["world_size"]
    return int(consumed * before // after)


def _root(ranks: CollectiveCalls, directory: str | os.PathLike[str] | None) -> Path:
    name = directory or os.environ.get("TULA_CHECKPOINT_DIR")

    def named() -> Path:
        if not name:
            raise CheckpointError("no checkpoint directory: set TULA_CHECKPOINT_DIR or pass directory=")
        return Path(name)

    return ranks.on_each(named, "no checkpoint directory", "set TULA_CHECKPOINT_DIR or pass directory=")


def _agreed_newest(ranks: CollectiveCalls, root: Path) -> Path | None:
    """The newest that the first rank sees, on all ranks: they may look at different moments."""

    def look() -> str | None:
        complete = _complete(root)
        return complete[-1].name if complete else None

    name = ranks.on_first(look, f"checkpoints below {root} cannot be listed", "let all ranks read that directory")
    return None if name is None else root / name


def _unreadable(folder: Path) -> tuple[str, str]:
    return (
        f"the checkpoint {folder} does not fit this script or cannot be read",
        "delete it, undo the change, or let all ranks read it",
    )


def _check_fit(saved: Mapping[str, Any], model: torch.nn.Module, optimizer: Any) -> None:
    """Raise ValueError for what torch or gradient scaling would refuse of `saved`, before any rank has loaded anything.

    Sharded weights are not compared, nor models and optimizers with their own loading: they may accept other names.
    """
    if is_sharded(model.parameters(), [model]):
        return
    module, inner = _unwrapped(model), getattr(optimizer, "optimizer", optimizer)
    if "model" in saved and not has_own_loading(module):
        _compare_weights(saved["model"], module.state_dict())
    if saved.get("optimizer") is not None and has_plain_loading(inner):
        groups = saved["optimizer"]["param_groups"], inner.param_groups
        before, now = ([len(group["params"]) for group in each] for each in groups)
        if before != now:
            raise ValueError(f"the optimizer's groups have {before} parameters there and {now} here")
    if saved.get("optimizer") is not None and hasattr(optimizer, "check_state_dict"):
        optimizer.check_state_dict(saved["optimizer"])


def _compare_weights(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    for name, value in current.items():
        if name not in saved:
            raise ValueError(f"the model's {name} is not in it")
        if not (isinstance(value, torch.Tensor) and isinstance(saved[name], torch.Tensor)):
            continue
        before, now = list(saved[name].shape), list(value.shape)
        if before != now and (before, now) != ([1], []):  # torch loads one element into a scalar
            raise ValueError(f"the model's {name} has shape {before} there and {now} here")
    for name in saved:
        if name not in current:
            raise ValueError(f"the model has no {name}")


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


# What all ranks do in the same order.


class CollectiveCalls:
    """Calls that every rank training `model` makes in the same order, and that succeed or fail on all of them.

    Each method raises `CheckpointError` on all ranks with one sentence, "`what` (rank, error): `remedy`", that of the
    first rank that failed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if distributed else 0
        self.size: int = dist.get_world_size() if distributed else 1
        # NCCL moves objects over the current device, which a script may have left at the first one on every rank.
        self._device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)

    def on_each(self, function: Callable[[], T], what: str, remedy: str) -> T:
        """Call `function` on every rank; returns its result on this one."""
        value, error, cause = self._try(function, what, remedy)
        errors = [error]
        if self.size > 1:
            errors = [None] * self.size
            with self._on_device():
                dist.all_gather_object(errors, error)
        _raise(next((sentence for sentence in errors if sentence is not None), None), cause)
        return cast(T, value)

    def on_first(self, function: Callable[[], T], what: str, remedy: str) -> T:
        """Call `function` on the first rank only; returns its result on every rank (pickled, so keep it small)."""
        value, error, cause = self._try(function, what, remedy) if self.rank == 0 else (None, None, None)
        outcome: list[Any] = [value, error]
        if self.size > 1:
            with self._on_device():
                dist.broadcast_object_list(outcome, src=0)
        _raise(outcome[1], cause)
        return cast(T, outcome[0])

    def _try(self, function: Callable[[], T], what: str, remedy: str) -> tuple[T | None, str | None, Exception | None]:
        try:
            return function(), None, None
        except CheckpointError as error:
            return None, str(error), error  # a sentence already
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}"[:_LONGEST].split())
            who = f"rank {self.rank}: " if self.size > 1 else ""
            return None, f"{what} ({who}{text}): {remedy}", error

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


def _raise(sentence: str | None, cause: Exception | None) -> None:
    if sentence is not None:
        raise CheckpointError(sentence) from cause


# Folders on disk.


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


def _seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Mark `folder` as complete, with `facts`."""
    _replace(folder / _COMPLETE, lambda path: path.write_text(json.dumps(facts)))


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


def _write(path: Path, value: Any) -> None:
    """Write `value` in torch's format; a crash leaves nothing under the name `path`."""
    _replace(path, lambda new: torch.save(value, new))


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


# Sharded models.


def _save_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """Functions that every rank must call in this order, each only if the one before succeeded on all ranks.

    They contain collectives of torch: a rank that failed before would leave the others waiting.
    """
    state: dict[str, Any] = {}

    def write() -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _plain_errors():
            save(state, checkpoint_id=str(folder / _SHARDS))

    return [lambda: state.update(_gathered(model, optimizer)), write]


def _load_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """The functions that load what those of `_save_parts` wrote; the same rules hold."""
    state: dict[str, Any] = {}

    def read() -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with _plain_errors():
            load(state, checkpoint_id=str(folder / _SHARDS))

    def apply() -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(model, _inner(optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return [lambda: state.update(_gathered(model, optimizer)), read, apply]


def _gathered(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, _inner(optimizer))
    return {"model": of_model, "optimizer": of_optimizer}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise RuntimeError with the first rank's cause: torch's own is no `Exception` and holds every rank's stack."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise RuntimeError(f"the shard of rank {rank}: {type(cause).__name__}: {cause}") from error


def _inner(optimizer: Any) -> Any:
    """The optimizer with the sharded state; factors of gradient scaling are estimated again after a sharded resume."""
    return () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
