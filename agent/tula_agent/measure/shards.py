"""Whether the ranks share the data, or every one of them reads all of it."""

from __future__ import annotations

from typing import Any

from tula_agent.guard import logger

__all__ = ["check_shards"]


def check_shards(loader: Any, dataset_size: int | None, world_size: int) -> None:
    """Warn when an epoch of all ranks reads far more than `dataset_size` examples; silent where nobody can tell."""
    size = getattr(loader, "batch_size", None)
    if world_size < 2 or not dataset_size or not isinstance(size, int) or not hasattr(loader, "__len__"):
        return
    seen = len(loader) * size * world_size
    if seen > 1.5 * dataset_size + size * world_size:
        logger.warning(
            "an epoch reads %d examples of %d: give the loader a DistributedSampler, or every rank reads all",
            seen,
            dataset_size,
        )
