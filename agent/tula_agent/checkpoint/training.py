"""A training written into a checkpoint, gone on with, and taken back to one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tula_agent.checkpoint import folders
from tula_agent.checkpoint.alike import Alike, CheckpointError
from tula_agent.checkpoint.fit import misfit
from tula_agent.checkpoint.shards import load_parts, save_parts
from tula_agent.guard import logger
from tula_agent.position import capture_randomness, restore_randomness
from tula_agent.torch_private import is_sharded

if TYPE_CHECKING:
    from tula_agent.session import Run

__all__ = ["Resumed", "resume", "roll_back", "save"]


@dataclass(frozen=True)
class Resumed:
    """Where to go on: at batch `consumed` of pass `epoch`, with `step` micro-steps behind.

    `run.steps` skips what was consumed by itself. `exact` is False when the configuration has changed since.
    """

    epoch: int = 0
    step: int = 0
    consumed: int = 0
    exact: bool = True
    found: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: dict[str, Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a checkpoint; every rank must call it at the same step. Returns its folder.

    `extra` holds whatever else the script needs: numbers, text, tensors, lists and dictionaries of them.
    Raises `CheckpointError` on all ranks, without a directory or where one of them cannot write; earlier checkpoints
    are as they were, and what was written of this one is deleted.
    """
    alike, position = Alike(model), run.position
    root = _root(alike, directory)
    failing = f"no checkpoint of step {position.step} was written below {root}, the one before still counts"
    remedy = "all ranks need the same directory, with room in it"
    folder = root / alike.first(lambda: folders.begin(root, position.step).name, failing, remedy)
    parts = save_parts(folder, model, optimizer) if is_sharded(model.parameters(), [model]) else []

    def write() -> None:
        whole: dict[str, Any] = {"extra": extra or {}}
        for name, part in (("scheduler", scheduler), ("scaler", scaler)):
            if part is not None:
                whole[name] = part.state_dict()
        if not parts:
            whole["model"] = _unwrapped(model).state_dict()
            whole["optimizer"] = None if optimizer is None else optimizer.state_dict()
        if alike.rank == 0:
            folders.write(folder / "training.pt", whole)
        own = {
            "epoch": position.epoch,
            "step": position.step,
            "consumed": position.consumed,
            "at_pass_start": position.at_pass_start,
            "now": capture_randomness(position.loader),
        }
        folders.write(folder / f"rank-{alike.rank}.pt", own)

    facts = {"step": position.step, "scaling": _scaling_of(optimizer), **_shape(alike, position.loader)}
    try:
        for part in (write, *parts):
            alike.each(part, failing, remedy)
        alike.first(lambda: folders.seal(folder, facts), failing, remedy)
    except CheckpointError:
        if alike.rank == 0:
            folders.delete(folder)
        raise
    if alike.rank == 0:
        _tidy(folders.superseded, folder)
    return folder


def resume(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loader: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    directory: str | os.PathLike[str] | None = None,
) -> Resumed:
    """Load the newest complete checkpoint, if there is one; every rank must call it, once all is built.

    Loop over `range(resumed.epoch, epochs)` afterwards. After a change of batch or ranks the place in the data is kept
    in examples, and the random numbers start afresh. Raises `CheckpointError` on all ranks when the checkpoint does not
    fit, or cannot be read on one of them. No rank has changed anything where a file cannot be read, or where the names
    and shapes of the weights or the optimizer's groups differ. Shards, and whatever loads in a way of its own (a model,
    an optimizer, a scheduler, a GradScaler), may be half loaded: do not train on after that.
    """
    alike = Alike(model)
    folder = _agreed_newest(alike, directory)
    run.position.told = True
    if folder is None:
        return Resumed()
    now = _shape(alike, loader)

    def read() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        facts = folders.facts_of(folder)
        own = folder / f"rank-{min(alike.rank, facts['world_size'] - 1)}.pt"
        return facts, _load(folder / "training.pt"), _load(own)

    facts, whole, own = alike.each(read, *_unreadable(folder))
    _must_fit(alike, folder, whole, model, optimizer)

    def load() -> None:
        if "model" in whole:
            _unwrapped(model).load_state_dict(whole["model"])
            if optimizer is not None and whole["optimizer"] is not None:
                optimizer.load_state_dict(whole["optimizer"])
        for name, part in (("scheduler", scheduler), ("scaler", scaler)):
            if part is not None and name in whole:
                part.load_state_dict(whole[name])

    def go_on() -> Resumed:
        exact = all(facts[name] == now[name] or now[name] is None for name in ("world_size", "local_batch_size"))
        consumed = own["consumed"] if exact else _same_examples(own["consumed"], facts, now)
        position = run.position
        position.epoch, position.step, position.resumed_at = own["epoch"], own["step"], own["step"]
        position.epochs_before = float(own["epoch"])
        if exact:
            restore_randomness(own["now"], loader)
        if own["consumed"]:
            position.restore(consumed, own["at_pass_start"], own["now"] if exact else None)
        return Resumed(own["epoch"], own["step"], consumed, exact, True, whole["extra"])

    parts = [] if "model" in whole else load_parts(folder, model, optimizer)
    for part in (*parts, load):
        alike.each(part, *_unreadable(folder))
    resumed = alike.each(go_on, *_unreadable(folder))
    if not resumed.exact:
        logger.warning("resumed with another batch or number of ranks: the data goes on where it was, in a new order")
    return resumed


def roll_back(
    run: Run,
    model: torch.nn.Module,
    optimizer: Any,
    *,
    scaler: Any = None,
    directory: str | os.PathLike[str] | None = None,
) -> bool:
    """Go back to the weights from before a setting of gradient scaling that hurt, if the service asked; True if done.

    Every rank must call it at the same step, for example once an epoch; without a request it costs nothing. Weights and
    optimizer come from the newest checkpoint at or before the step that the service named; the place in the data, the
    learning-rate schedule and the random numbers go on. Later checkpoints hold the harm and are deleted. Where none is
    old enough, or the model is sharded, that is said once and training goes on with the settings taken back.
    Raises `CheckpointError` without a directory, and on all ranks when the checkpoint does not fit or cannot be read on
    one of them; what has changed by then is as after `resume`.
    """
    step = getattr(optimizer, "restore_step", None)
    if step is None:
        return False
    alike = Alike(model)
    folder = None
    if not is_sharded(model.parameters(), [model]):
        folder = _agreed_newest(alike, directory, not_after=_micro_steps(run, step))
    if folder is None:
        logger.warning("scaling settings were taken back, but no whole checkpoint is from step %d or before", step)
        optimizer.roll_back(None)
        return False
    whole = alike.each(lambda: _load(folder / "training.pt"), *_unreadable(folder))
    _must_fit(alike, folder, whole, model, optimizer)

    def load() -> None:
        _unwrapped(model).load_state_dict(whole["model"])
        optimizer.roll_back(whole["optimizer"])
        if scaler is not None and "scaler" in whole:
            scaler.load_state_dict(whole["scaler"])

    alike.each(load, *_unreadable(folder))  # no rank changes anything before all could read and it fits all
    if alike.rank == 0:
        _tidy(folders.newer_than, folder)
    logger.warning("scaling settings were taken back: weights are those of %s again", folder.name)
    return True


def _micro_steps(run: Run, step: int) -> int:
    """The service counts steps of a run from zero, a checkpoint micro-steps from the start of training.

    A run that torchrun restarted has counted from zero twice; then the earlier place is meant.
    """
    if run.recorder is None:
        return run.position.resumed_at + step
    restarted = run.recorder.config.restart.rpartition("-")[2] != "0"  # the first part: a run of its own
    return (0 if restarted else run.position.resumed_at) + step * run.recorder.timer.grad_accum_steps


def _scaling_of(optimizer: Any) -> list[Any] | None:
    thresholds = getattr(optimizer, "thresholds", None)
    return None if thresholds is None else [thresholds.policy, thresholds.delta, thresholds.small_batch_size]


def _tidy(find: Callable[[Path], list[Path]], kept: Path) -> None:
    """Delete what is no longer wanted beside `kept`; the work is done, and nothing in the way may end the training."""
    try:
        for folder in find(kept):
            folders.delete(folder)
    except Exception as error:
        logger.warning("checkpoints beside %s that are no longer wanted were not deleted: %r", kept, error)


def _same_examples(consumed: int, then: dict[str, Any], now: dict[str, Any]) -> int:
    before = (then["local_batch_size"] or 1) * then["world_size"]
    after = (now["local_batch_size"] or then["local_batch_size"] or 1) * now["world_size"]
    return int(consumed * before // after)


def _root(alike: Alike, directory: str | os.PathLike[str] | None) -> Path:
    def named() -> Path:
        name = directory or os.environ.get("TULA_CHECKPOINT_DIR")
        if not name:
            raise CheckpointError("no checkpoint directory: set TULA_CHECKPOINT_DIR or pass directory=")
        return Path(name)

    return alike.each(named, "no checkpoint directory", "set TULA_CHECKPOINT_DIR or pass directory=")


def _agreed_newest(
    alike: Alike, directory: str | os.PathLike[str] | None, *, not_after: int | None = None
) -> Path | None:
    """What the first rank sees, so that ranks that look at different moments load the same."""
    root = _root(alike, directory)

    def look() -> str | None:
        found = folders.newest(root, not_after=not_after)
        return None if found is None else found.name

    name = alike.first(look, f"checkpoints below {root} cannot be listed", "let all ranks read that directory")
    return None if name is None else root / name


def _unreadable(folder: Path) -> tuple[str, str]:
    return (
        f"the checkpoint {folder} does not fit this script or cannot be read",
        "delete it, undo the change, or let all ranks read it",
    )


def _must_fit(alike: Alike, folder: Path, whole: dict[str, Any], model: torch.nn.Module, optimizer: Any) -> None:
    """Refuse on all ranks, before any has loaded a thing, what is known not to fit one of them."""

    def compare() -> None:
        found = None if is_sharded(model.parameters(), [model]) else misfit(whole, _unwrapped(model), optimizer)
        if found is not None:
            raise ValueError(found)

    alike.each(compare, f"the checkpoint {folder} does not fit this script", "delete it or undo the change")


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _shape(alike: Alike, loader: Any) -> dict[str, Any]:
    size = getattr(loader, "batch_size", None) if loader is not None else None
    if not isinstance(size, int):
        text = os.environ.get("TULA_LOCAL_BATCH_SIZE", "")
        size = int(text) if text.isdigit() else None
    return {"world_size": alike.size, "local_batch_size": size}


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, so that a checkpoint loads with and without it."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, torch.nn.Module)
    return inner
