"""Save a training and resume it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tula_agent.checkpoint import folders
from tula_agent.checkpoint.collective import CheckpointError, CollectiveCalls
from tula_agent.checkpoint.position import Position, capture_randomness, restore_randomness
from tula_agent.checkpoint.shards import load_parts, save_parts
from tula_agent.guard import logger
from tula_agent.torch_private import has_own_loading, has_plain_loading, is_sharded


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
    folder = root / ranks.on_first(lambda: folders.create(root, position.step).name, failing, remedy)
    parts = save_parts(folder, model, optimizer) if is_sharded(model.parameters(), [model]) else []

    def write() -> None:
        whole: dict[str, Any] = {"extra": extra or {}}
        for name, part in (("scheduler", scheduler), ("scaler", scaler)):
            if part is not None:
                whole[name] = part.state_dict()
        if not parts:
            whole["model"] = _unwrapped(model).state_dict()
            whole["optimizer"] = None if optimizer is None else optimizer.state_dict()
        if ranks.rank == 0:
            folders.write(folder / "training.pt", whole)
        own = {
            "epoch": position.epoch,
            "step": position.step,
            "consumed": position.consumed,
            "at_pass_start": position.at_epoch_start,  # the stored name
            "now": capture_randomness(position.loader),
        }
        folders.write(folder / f"rank-{ranks.rank}.pt", own)

    facts = {"step": position.step, **_shape(ranks, position.loader)}
    try:
        for part in (write, *parts):
            ranks.on_each(part, failing, remedy)
        ranks.on_first(lambda: folders.seal(folder, facts), failing, remedy)
    except CheckpointError:
        if ranks.rank == 0:
            folders.delete(folder)
        raise
    if ranks.rank == 0:
        _tidy(folder)
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
    folder = _agreed_newest(ranks, directory)
    position.known = True
    if folder is None:
        return Resumed()

    def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        facts = folders.facts_of(folder)
        own = folder / f"rank-{min(ranks.rank, facts['world_size'] - 1)}.pt"
        return facts, _load(folder / "training.pt"), _load(own)

    facts, whole, own = ranks.on_each(read, *_unreadable(folder))
    _must_fit(ranks, folder, whole, model, optimizer)

    parts = [] if "model" in whole else load_parts(folder, model, optimizer)
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


def _tidy(kept: Path) -> None:
    """Delete what `kept` supersedes; a failure of that must not end the training."""
    try:
        for folder in folders.superseded(kept):
            folders.delete(folder)
    except Exception as error:
        logger.warning("old checkpoints besides %s were not deleted: %r", kept, error)


def _same_examples(consumed: int, then: dict[str, Any], now: dict[str, Any]) -> int:
    before = (then["local_batch_size"] or 1) * then["world_size"]
    after = (now["local_batch_size"] or then["local_batch_size"] or 1) * now["world_size"]
    return int(consumed * before // after)


def _root(ranks: CollectiveCalls, directory: str | os.PathLike[str] | None) -> Path:
    def named() -> Path:
        name = directory or os.environ.get("TULA_CHECKPOINT_DIR")
        if not name:
            raise CheckpointError("no checkpoint directory: set TULA_CHECKPOINT_DIR or pass directory=")
        return Path(name)

    return ranks.on_each(named, "no checkpoint directory", "set TULA_CHECKPOINT_DIR or pass directory=")


def _agreed_newest(ranks: CollectiveCalls, directory: str | os.PathLike[str] | None) -> Path | None:
    """The newest that the first rank sees, on all ranks: they may look at different moments."""
    root = _root(ranks, directory)

    def look() -> str | None:
        found = folders.newest(root)
        return None if found is None else found.name

    name = ranks.on_first(look, f"checkpoints below {root} cannot be listed", "let all ranks read that directory")
    return None if name is None else root / name


def _unreadable(folder: Path) -> tuple[str, str]:
    return (
        f"the checkpoint {folder} does not fit this script or cannot be read",
        "delete it, undo the change, or let all ranks read it",
    )


def _must_fit(
    ranks: CollectiveCalls, folder: Path, whole: dict[str, Any], model: torch.nn.Module, optimizer: Any
) -> None:
    """Raise on all ranks, before any has loaded anything, if the checkpoint is known not to fit one of them."""

    def compare() -> None:
        found = None if is_sharded(model.parameters(), [model]) else _mismatch(whole, _unwrapped(model), optimizer)
        if found is not None:
            raise ValueError(found)

    ranks.on_each(compare, f"the checkpoint {folder} does not fit this script", "delete it or undo the change")


def _mismatch(saved: Mapping[str, Any], model: torch.nn.Module, optimizer: Any) -> str | None:
    """What torch would refuse of the state saved under `model` and `optimizer`, in words; None if nothing is known.

    Sharded weights are not compared, nor models and optimizers with their own loading: they may accept other names.
    """
    found = None
    if "model" in saved and not has_own_loading(model):
        found = _of_model(saved["model"], model.state_dict())
    inner = getattr(optimizer, "optimizer", optimizer)
    if found is None and saved.get("optimizer") is not None and has_plain_loading(inner):
        found = _of_optimizer(saved["optimizer"]["param_groups"], inner.param_groups)
    return found


def _of_model(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    for name, value in current.items():
        if name not in saved:
            return f"the model's {name} is not in it"
        if not (isinstance(value, torch.Tensor) and isinstance(saved[name], torch.Tensor)):
            continue
        before, now = list(saved[name].shape), list(value.shape)
        if before != now and (before, now) != ([1], []):  # torch loads one element into a scalar
            return f"the model's {name} has shape {before} there and {now} here"
    unknown = next((name for name in saved if name not in current), None)
    return None if unknown is None else f"the model has no {unknown}"


def _of_optimizer(saved: list[Any], current: list[Any]) -> str | None:
    before, now = ([len(group["params"]) for group in groups] for groups in (saved, current))
    return None if before == now else f"the optimizer's groups have {before} parameters there and {now} here"


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


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
