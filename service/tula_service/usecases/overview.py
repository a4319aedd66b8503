"""The whole service in a few numbers, read from the database, so that every replica tells the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tula_service.store import Store

__all__ = ["Overview", "overview"]

_SHARES: Final = (0.5, 0.9)


@dataclass(frozen=True)
class Overview:
    """`prediction_error` holds quantiles of the absolute relative error over the newest thousand outcomes."""

    runs_by_state: Mapping[str, int]
    num_agents: int
    num_fits: int
    prediction_error: Mapping[float, float]


def overview(store: Store) -> Overview:
    """Queue, agents, kept fits, and how predictions turned out."""
    with store.reading() as tx:
        by_state = {state.value: number for state, number in tx.runs.count_by_state().items()}
        num_agents, num_fits = tx.samples.count_processes(), tx.fits.count()
        outcomes = tx.ledger.outcomes()
    errors = [abs(entry.outcome.error) for entry in outcomes if entry.outcome and entry.outcome.error is not None]
    quantiles = {share: float(np.quantile(errors, share)) for share in _SHARES} if errors else {}
    return Overview(by_state, num_agents, num_fits, quantiles)
