"""`run.checkpoint` and `run.resume`: a training stopped anywhere goes on as if it had not been stopped.

A checkpoint is a folder `step-<number>` below TULA_CHECKPOINT_DIR:

    training.pt       model, optimizer (with the state of gradient scaling), scheduler, GradScaler, the script's extra
    shards/           instead of the first two when the model is sharded (torch.distributed.checkpoint)
    rank-<r>.pt       of each rank: its place in the data and its random number generators
    complete.json     written last; a folder without it is never read

On CPU a resumed run is bit for bit the run that was not stopped, as long as configuration and script are the same.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from tula_agent.guard import logger
from tula_agent.position import capture_randomness, restore_randomness

if TYPE_CHECKING:
    from tula_agent.session import Run

__all__ = ["CheckpointError", "Resumed", "resume", "roll_back", "save"]

KEEP: Final = 2
"""Complete checkpoints that are kept; older ones are deleted once a newer one is complete.

One more is kept: the newest that was made under other settings of gradient scaling, to which `roll_back` goes.
"""

_COMPLETE: Final = "complete.json"
_OURS: Final = re.compile(r"step-[0-9]+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; unlike measuring, this is the training's own business and does raise."""


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
    Raises `CheckpointError` without a directory, and OSError when it cannot be written.
    """
    position = run.position
    root = _directory(directory)
    folder = root / f"step-{position.step:010d}"
    if _rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    _barrier()
    whole: dict[str, Any] = {"extra": extra or {}}
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None:
            whole[name] = part.state_dict()
    if _is_sharded(model):
        _save_shards(folder, model, optimizer)
    else:
        whole["model"] = _unwrapped(model).state_dict()
        whole["optimizer"] = None if optimizer is None else optimizer.state_dict()
    if _rank() == 0:
        _write(folder / "training.pt", whole)
    own = {
        "epoch": position.epoch,
        "step": position.step,
        "consumed": position.consumed,
        "at_pass_start": position.at_pass_start,
        "now": capture_randomness(position.loader),
    }
    _write(folder / f"rank-{_rank()}.pt", own)
    _barrier()
    if _rank() == 0:
        facts = {"step": position.step, "scaling": _scaling_of(optimizer), **_shape(position.loader)}
        _replace(folder / _COMPLETE, lambda path: path.write_text(json.dumps(facts)))
        for old in _superseded(_complete(root)):
            shutil.rmtree(old, ignore_errors=True)
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
    in examples, and the random numbers start afresh. Raises `CheckpointError` when a checkpoint does not fit.
    """
    root = _directory(directory)
    folder = _agreed_newest(root)
    run.position.told = True
    if folder is None:
        return Resumed()
    facts = json.loads((folder / _COMPLETE).read_text())
    try:
        whole = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
        if (folder / "shards").is_dir():
            _load_shards(folder, model, optimizer)
        else:
            _unwrapped(model).load_state_dict(whole["model"])
            if optimizer is not None and whole["optimizer"] is not None:
                optimizer.load_state_dict(whole["optimizer"])
        for name, part in (("scheduler", scheduler), ("scaler", scaler)):
            if part is not None and name in whole:
                part.load_state_dict(whole[name])
        ranks = facts["world_size"]
        own = torch.load(folder / f"rank-{min(_rank(), ranks - 1)}.pt", map_location="cpu", weights_only=True)
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {folder} does not fit this script ({error}): delete it, or undo the change"
        ) from error
    now = _shape(loader)
    exact = all(facts[name] == now[name] or now[name] is None for name in ("world_size", "local_batch_size"))
    consumed = own["consumed"] if exact else _same_examples(own["consumed"], facts, now)
    position = run.position
    position.epoch, position.step, position.resumed_at = own["epoch"], own["step"], own["step"]
    position.epochs_before = float(own["epoch"])
    if exact:
        restore_randomness(own["now"], loader)
    if own["consumed"]:
        position.restore(consumed, own["at_pass_start"], own["now"] if exact else None)
    if not exact:
        logger.warning("resumed with another batch or number of ranks: the data goes on where it was, in a new order")
    return Resumed(own["epoch"], own["step"], consumed, exact, True, whole["extra"])


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
    one of them.
    """
    step = getattr(optimizer, "restore_step", None)
    if step is None:
        return False
    folder = None if _is_sharded(model) else _agreed_newest(_directory(directory), not_after=_micro_steps(run, step))
    if folder is None:
        logger.warning("scaling settings were taken back, but no whole checkpoint is from step %d or before", step)
        optimizer.roll_back(None)
        return False
    whole: dict[str, Any] = {}

    def read() -> None:
        whole.update(torch.load(folder / "training.pt", map_location="cpu", weights_only=True))

    def load() -> None:
        _unwrapped(model).load_state_dict(whole["model"])
        optimizer.roll_back(whole["optimizer"])
        if scaler is not None and "scaler" in whole:
            scaler.load_state_dict(whole["scaler"])

    for part in (read, load):  # no rank changes anything before all could read
        _on_all_ranks(part, folder)
    if _rank() == 0:
        for later in _complete(folder.parent):
            if _step_of(later) > _step_of(folder):
                shutil.rmtree(later, ignore_errors=True)
    logger.warning("scaling settings were taken back: weights are those of %s again", folder.name)
    return True


def _on_all_ranks(part: Callable[[], None], folder: Path) -> None:
    """Do `part`; where it fails on any rank it fails on all: the others would wait for that one for ever."""
    failure: str | None = None
    cause: Exception | None = None
    try:
        part()
    except Exception as error:
        failure, cause = f"rank {_rank()}: {type(error).__name__}: {error}", error
    failures = [failure]
    if _world_size() > 1:
        failures = [None] * _world_size()
        dist.all_gather_object(failures, failure)
    said = next((each for each in failures if each is not None), None)
    if said is not None:
        raise CheckpointError(
            f"the checkpoint {folder} does not fit this script or cannot be read ({said}): delete it or undo the change"
        ) from cause


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


def _superseded(complete: list[Path]) -> list[Path]:
    """Those that may go: neither among the newest nor the newest under other scaling settings than the last one's."""
    settings = [json.loads((path / _COMPLETE).read_text()).get("scaling") for path in complete]
    other = [path for path, setting in zip(complete, settings, strict=True) if setting != settings[-1]]
    return [path for path in complete[:-KEEP] if path not in other[-1:]]


def _same_examples(consumed: int, then: dict[str, Any], now: dict[str, Any]) -> int:
    before = (then["local_batch_size"] or 1) * then["world_size"]
    after = (now["local_batch_size"] or then["local_batch_size"] or 1) * now["world_size"]
    return int(consumed * before // after)


def _directory(directory: str | os.PathLike[str] | None) -> Path:
    named = directory or os.environ.get("TULA_CHECKPOINT_DIR")
    if not named:
        raise CheckpointError("no checkpoint directory: set TULA_CHECKPOINT_DIR or pass directory=")
    return Path(named)


def _shape(loader: Any) -> dict[str, Any]:
    size = getattr(loader, "batch_size", None) if loader is not None else None
    if not isinstance(size, int):
        text = os.environ.get("TULA_LOCAL_BATCH_SIZE", "")
        size = int(text) if text.isdigit() else None
    return {"world_size": _world_size(), "local_batch_size": size}


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; a copy that someone put beside them under another name is none of ours."""
    found = [path.parent for path in root.glob(f"step-*/{_COMPLETE}")]
    return sorted((path for path in found if _OURS.fullmatch(path.name)), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _agreed_newest(root: Path, *, not_after: int | None = None) -> Path | None:
    """What the first rank sees, so that ranks that look at different moments load the same."""
    found = [path for path in _complete(root) if not_after is None or _step_of(path) <= not_after]
    name = [found[-1].name if found else None]
    if _world_size() > 1:
        dist.broadcast_object_list(name, src=0)
    return None if name[0] is None else root / name[0]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP, so that a checkpoint loads with and without it."""
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    assert isinstance(inner, torch.nn.Module)
    return inner


def _is_sharded(model: torch.nn.Module) -> bool:
    """FSDP, either version: no rank holds the whole model."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _save_shards(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    weights, state = get_state_dict(model, _inner(optimizer))
    save_shards({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "shards"))


def _load_shards(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    weights, state = get_state_dict(model, _inner(optimizer))
    held: dict[str, Any] = {"model": weights, "optimizer": state}
    load_shards(held, checkpoint_id=str(folder / "shards"))
    set_state_dict(model, _inner(optimizer), model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def _inner(optimizer: torch.optim.Optimizer | None) -> Any:
    """What holds the sharded state; factors of gradient scaling are estimated anew after a sharded resume."""
    return () if optimizer is None else getattr(optimizer, "optimizer", optimizer)


def _write(path: Path, value: Any) -> None:
    _replace(path, lambda new: torch.save(value, new))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside `path`, bring it to disk, then take its name: a crash leaves no half file under that name."""
    new = path.with_name(f".{path.name}.new")
    write(new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(path)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _barrier() -> None:
    if _world_size() > 1:
        dist.barrier()
