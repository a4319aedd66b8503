"""Saves and resumes training, so that a run stopped at any step continues as if it had not been stopped.

A checkpoint is a folder `step-<ten digits>` below TULA_CHECKPOINT_DIR, or `step-<ten digits>.<n>` if it is the n-th
checkpoint of that step. `torch.distributed.checkpoint` writes the model and the optimizer under the names of the
weights, so a checkpoint does not depend on wrappers (DDP, torch.compile), on sharding or on the number of ranks. This
module adds what the torch package does not save: the scheduler, the GradScaler, the script's extra state, and each
rank's position in the data and random number generators.

`tula.json` is written first. Only a folder that contains `tula.json` is ever deleted, and only the checkpoint's files
in that folder. Torch's `.metadata` is written last, and a folder without `.metadata` is never read.

On a CPU, a resumed run matches an uninterrupted run bit for bit if the configuration and the script are the same. If
one rank fails to write or read, all ranks raise the same `CheckpointError`, and no rank waits forever for another.
"""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist

from tula_agent.guard import logger
from tula_agent.position import Position, capture_randomness, restore_randomness

T = TypeVar("T")

KEEP: Final = 2
"""Number of steps whose newest complete checkpoint is kept; older checkpoints are deleted once a newer one is complete.
"""

_OURS: Final = "tula.json"
_COMPLETE: Final = ".metadata"
_NAME: Final = re.compile(r"step-([0-9]{10})(?:\.([0-9]+))?")
_LONGEST: Final = 2000  # characters of an error that are sent to the other ranks


class CheckpointError(RuntimeError):
    """Raised in the script if a checkpoint cannot be written or read, since training depends on checkpoints."""


@dataclass(frozen=True)
class Resumed:
    """The point at which training continues: batch `consumed` of epoch `epoch`, after `step` micro-steps.

    `run.steps` skips the consumed batches. `exact` is False if the configuration has changed since the checkpoint was
    written.
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
    """Write a checkpoint and return its folder; every rank must call this function at the same step.

    `extra` is the script's own state, which may contain numbers, text, tensors, and lists or dictionaries of these.
    Raises `CheckpointError` on all ranks if no directory is configured or a rank cannot write. In this case, earlier
    checkpoints are not changed, and the unfinished checkpoint is deleted.
    """
    ranks = _Ranks(model)
    root = _root(ranks, directory)
    ranks.failing = (
        f"no checkpoint of step {position.step} was written below {root}; the previous checkpoint is still valid"
    )
    ranks.remedy = "give all ranks the same directory, with enough free space"
    facts = {"step": position.step, **_shape(ranks, position.loader)}
    folder = root / ranks.on_first(lambda: _new_folder(root, facts))

    def gather() -> dict[str, Any]:
        if not (folder / _OURS).exists():
            raise FileNotFoundError(f"{folder} is not the same folder as on the first rank")
        state = _weights(model, optimizer)
        own = {
            "epoch": position.epoch,
            "step": position.step,
            "consumed": position.consumed,
            "at_epoch_start": position.at_epoch_start,
            "now": capture_randomness(position.loader),
        }
        state[f"rank-{ranks.rank}"] = _packed(own)
        if ranks.rank == 0:
            parts = {"scheduler": scheduler, "scaler": scaler}
            rest: dict[str, Any] = {k: None if part is None else part.state_dict() for k, part in parts.items()}
            state["rest"] = _packed({**rest, "optimizer": _describe(optimizer), "extra": extra or {}})
        return state

    try:
        state = ranks.on_each(gather)
        ranks.through_torch("save", state, folder)
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
    """Load the newest complete checkpoint, if any; every rank must call this function after all objects are built.

    Afterwards, loop over `range(resumed.epoch, epochs)`. If the batch size or the number of ranks has changed, training
    continues after the same number of examples, and the random number generators start afresh. Weights are read in
    place, without a second copy. Torch's part of a checkpoint is pickled, and reading it can run arbitrary code, so
    resume only from a folder that you trust. Raises `CheckpointError` on all ranks if the checkpoint does not fit the
    model (in which case nothing has been changed), or if a rank cannot read the checkpoint. In the second case, do not
    continue training, since part of the checkpoint may have been loaded.
    """
    ranks = _Ranks(model)
    root = _root(ranks, directory)
    position.known = position.resumable = True
    ranks.failing, ranks.remedy = (
        f"checkpoints below {root} cannot be listed",
        "let all ranks read the directory",
    )
    # All ranks use the first rank's newest checkpoint, since each rank may list the folder at a different time.
    name = ranks.on_first(lambda: next((path.name for path in reversed(_complete(root))), None))
    if name is None:
        return Resumed()
    folder = root / name
    ranks.failing = f"the checkpoint {folder} does not fit this script or cannot be read"
    ranks.remedy = "delete it, undo the change, or give all ranks read access to it"
    facts = ranks.on_each(lambda: json.loads((folder / _OURS).read_text()))
    mine = f"rank-{min(ranks.rank, facts['world_size'] - 1)}"
    blobs: dict[str, Any] = {"rest": b"", mine: b""}
    ranks.through_torch("load", blobs, folder)

    def prepare() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        state = _weights(model, optimizer)
        _refuse_other_weights(state, folder)
        rest, facts = _unpacked(blobs["rest"]), _describe(optimizer)
        if facts is not None and rest["optimizer"] != facts:
            raise ValueError(f"the saved optimizer is {rest['optimizer']}, but the script's is {facts}")
        return state, rest, _unpacked(blobs[mine])

    state, rest, own = ranks.on_each(prepare)
    ranks.through_torch("load", state, folder)

    def apply() -> Resumed:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(
            model,
            () if optimizer is None else optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
        )
        for part, kept in ((scheduler, rest["scheduler"]), (scaler, rest["scaler"])):
            if part is not None and kept is not None:
                part.load_state_dict(kept)
        return _restore_position(position, facts, own, _shape(ranks, loader), loader, rest["extra"])

    resumed = ranks.on_each(apply)
    if not resumed.exact:
        logger.warning(
            "resumed with a different batch size or world size: training continues after the same number of "
            "examples, which now come in a different order"
        )
    return resumed


# The contents of a checkpoint.


def _weights(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the model's and optimizer's state for `torch.distributed.checkpoint`, without copying the tensors."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

    if optimizer is None:
        return {"model": get_model_state_dict(model)}
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def _describe(optimizer: Any) -> str | None:
    """Return the facts about the optimizer that must match those in a checkpoint; None if there is no optimizer.

    Torch would silently skip all state that the new optimizer lacks, including learning rates.
    """
    if optimizer is None:
        return None
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    kind, wrapped = (
        type(optimizer).__name__,
        getattr(optimizer, "optimizer", None),
    )  # in a TulaOptimizer
    kind += "" if wrapped is None else f" of {type(wrapped).__name__}"
    return f"{kind} with groups of {sizes} weights"


def _refuse_other_weights(state: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if the checkpoint lacks weights, or has weights that the model does not have.

    Torch would ignore both cases, but detects mismatched shapes before it changes any tensor.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    present = {f"model.{name}" for name in state["model"]}
    kept = {name for name in saved if name.startswith("model.")}
    for sentence, names in (("lacks", present - kept), ("has weights that the model lacks:", kept - present)):
        if names:
            raise ValueError(f"the checkpoint {sentence} {', '.join(sorted(names)[:5])}")


def _packed(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> dict[str, Any]:
    return cast("dict[str, Any]", torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True))


def _restore_position(
    position: Position,
    facts: dict[str, Any],
    own: dict[str, Any],
    shape: dict[str, Any],
    loader: Any,
    extra: dict[str, Any],
) -> Resumed:
    """Continue at the position in `own`, the state that this rank saved.

    `shape`: the current batch size and world size. `facts`: the batch size and world size in the checkpoint.
    """
    exact = all(facts[name] == size or size is None for name, size in shape.items())
    consumed = own["consumed"]
    if not exact:  # convert to the same number of examples
        before = facts["local_batch_size"] or 1
        after = (shape["local_batch_size"] or before) * shape["world_size"]
        consumed = int(consumed * before * facts["world_size"] // after)
    position.epoch, position.step = own["epoch"], own["step"]
    position.epochs_before = float(own["epoch"])
    if exact:
        restore_randomness(own["now"], loader)
    if own["consumed"]:
        position.pending = (consumed, own["at_epoch_start"], own["now"] if exact else None)
    return Resumed(own["epoch"], own["step"], consumed, exact, True, extra)


def _root(ranks: _Ranks, directory: str | os.PathLike[str] | None) -> Path:
    ranks.failing, ranks.remedy = "no checkpoint directory", "set TULA_CHECKPOINT_DIR or pass directory="
    name = directory or os.environ.get("TULA_CHECKPOINT_DIR")

    def named() -> Path:
        if not name:
            raise LookupError("none is given")
        return Path(name)

    return ranks.on_each(named)


def _shape(ranks: _Ranks, loader: Any) -> dict[str, Any]:
    size = getattr(loader, "batch_size", None) if loader is not None else None
    if not isinstance(size, int):
        text = os.environ.get("TULA_LOCAL_BATCH_SIZE", "")
        size = int(text) if text.isdigit() else None
    return {"world_size": ranks.size, "local_batch_size": size}


class _Ranks:
    """Runs functions on all ranks that train `model`; each call succeeds or fails on all ranks together.

    All ranks must call the methods in the same order. Each method raises `CheckpointError` on all ranks with the
    message of the first rank that failed: "`failing` (rank, error): `remedy`".
    """

    def __init__(self, model: torch.nn.Module) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if distributed else 0
        self.size: int = dist.get_world_size() if distributed else 1
        self.failing = self.remedy = ""
        # NCCL transfers objects through the current device, which may be the first device on every rank.
        device = next((p.device for p in model.parameters() if p.device.type == "cuda"), None)
        self._on_device = nullcontext() if device is None else torch.cuda.device(device)

    def on_each(self, function: Callable[[], T]) -> T:
        """Call `function` on every rank; return its result on this rank."""
        value, error = None, None
        try:
            value = function()
        except Exception as caught:
            error = caught
        for sentence in self._gathered(self._sentence(self.rank, error)):
            if sentence is not None:
                raise CheckpointError(sentence) from error
        return cast("T", value)

    def on_first(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank only; return its result, which should be small, on every rank."""
        return cast("T", self._gathered(self.on_each(lambda: function() if self.rank == 0 else None))[0])

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self._on_device:
                dist.all_gather_object(values, value)
        return values

    def through_torch(self, name: str, state: dict[str, Any], folder: Path) -> None:
        """Call `save` or `load` of torch.distributed.checkpoint, which itself makes all ranks fail together."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        # Weights that have had no gradient yet have no state to load. A parameter group's settings are one object.
        planner = DefaultLoadPlanner(allow_partial_load=True) if name == "load" else None
        try:
            with self._on_device, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
                getattr(dcp, name)(state, checkpoint_id=folder, planner=planner)
        except CheckpointException as error:  # not an `Exception`; contains every rank's stack
            rank, (cause, *_) = next(iter(error.failures.items()))
            raise CheckpointError(str(self._sentence(rank, cause))) from error

    def _sentence(self, rank: int, error: BaseException | None) -> str | None:
        if error is None:
            return None
        text = " ".join(f"{type(error).__name__}: {error}"[:_LONGEST].split())
        return f"{self.failing} ({f'rank {rank}: ' if self.size > 1 else ''}{text}): {self.remedy}"


# Folders.


def _new_folder(root: Path, facts: dict[str, Any]) -> str:
    """Create the folder of a new checkpoint of step `facts["step"]` below `root`; return the folder's name.

    If the step has complete checkpoints, the new one gets the next number. If a crash left an unfinished folder with
    that name, the folder is reused.
    """
    step = facts["step"]
    number = 1 + max((number for of, number in map(_age, _complete(root)) if of == step), default=0)
    folder = root / (f"step-{step:010d}" if number == 1 else f"step-{step:010d}.{number}")
    if folder.exists() and not (folder / _OURS).exists():
        raise FileExistsError(f"{folder} was not written by Tula")
    _delete(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _OURS).write_text(json.dumps(facts))
    return folder.name


def _delete_superseded(folder: Path) -> None:
    """Delete older checkpoints once `folder` is complete.

    The newest checkpoint of each of the last KEEP steps is kept, and older unfinished ones are deleted. A failure does
    not end the training run.
    """
    try:
        complete = _complete(folder.parent)
        last_of_step = list({_age(path)[0]: path for path in complete}.values())
        kept = {folder, *last_of_step[-KEEP:]}
        for path in _ours(folder.parent):
            if path not in kept and (path in complete or _age(path) < _age(folder)):
                _delete(path)
    except Exception as error:
        logger.warning("checkpoints older than %s could not be deleted: %r", folder, error)


def _delete(folder: Path) -> None:
    """Delete the files of a checkpoint, and the folder if nothing else is in it.

    `.metadata` is deleted first and `tula.json` last, since the process may be killed during the deletion.
    """
    try:
        for path in (folder / _COMPLETE, *folder.glob(".*.tmp"), *folder.glob("__*_*.distcp"), folder / _OURS):
            path.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return


def _ours(root: Path) -> list[Path]:
    """Return the folders of the agent's checkpoints, oldest first; copies under other names are ignored."""
    named = (path for path in root.glob("step-*") if _NAME.fullmatch(path.name))
    return sorted((path for path in named if (path / _OURS).exists()), key=_age)


def _complete(root: Path) -> list[Path]:
    return [path for path in _ours(root) if (path / _COMPLETE).exists()]


def _age(folder: Path) -> tuple[int, int]:
    """Return a checkpoint's step, and its number among the checkpoints of that step."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)
