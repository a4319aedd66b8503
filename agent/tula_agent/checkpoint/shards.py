"""Checkpoints of a sharded model (FSDP): every rank writes and reads its part by torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["load_parts", "save_parts"]

FOLDER: Final = "shards"


def save_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """What every rank must do, one after the other and each only where the one before succeeded on all ranks.

    They meet in collectives of torch inside: a rank that failed by itself must not leave the others alone in there.
    """
    held: dict[str, Any] = {}

    def write() -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        with _failures_named():
            save(held, checkpoint_id=str(folder / FOLDER))

    return [lambda: held.update(_gathered(model, optimizer)), write]


def load_parts(folder: Path, model: torch.nn.Module, optimizer: Any) -> list[Callable[[], None]]:
    """As `save_parts`, the other way round."""
    held: dict[str, Any] = {}

    def read() -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        with _failures_named():
            load(held, checkpoint_id=str(folder / FOLDER))

    def put() -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(model, _inner(optimizer), model_state_dict=held["model"], optim_state_dict=held["optimizer"])

    return [lambda: held.update(_gathered(model, optimizer)), read, put]


def _gathered(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(model, _inner(optimizer))
    return {"model": of_model, "optimizer": of_optimizer}


@contextmanager
def _failures_named() -> Iterator[None]:
    """torch tells all ranks of a failure, in an exception that is no `Exception` and holds every rank's stack."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise RuntimeError(f"the shard of rank {rank}: {type(cause).__name__}: {cause}") from error


def _inner(optimizer: Any) -> Any:
    """What holds the sharded state; factors of gradient scaling are estimated anew after a sharded resume."""
    return () if optimizer is None else getattr(optimizer, "optimizer", optimizer)
