"""Tests that past predictions calibrate the width of intervals."""

from __future__ import annotations

import numpy as np
import pytest

from tula_service.analysis.transfer import EarlierEvidence


def scale_from(pairs: np.ndarray) -> float:
    return EarlierEvidence(pairs=tuple(pairs)).interval_scale


def ledger(rng: np.random.Generator, sd: float, pairs: int = 400) -> np.ndarray:
    """Return predictions, both ends of their intervals, and measurements as an array of shape (pairs, 4)."""
    predicted = rng.uniform(0.1, 1.0, pairs)
    return np.column_stack([predicted, predicted / 1.1, predicted * 1.1, predicted * np.exp(rng.normal(0, sd, pairs))])


def test_little_history_leaves_intervals_as_they_are():
    assert scale_from(np.zeros((0, 4))) == 1.0
    assert scale_from(np.array([[1.0, 0.9, 1.1, 2.0]] * 2)) == 1.0


@pytest.mark.parametrize("sd", [0.03, 0.1, 0.15])
def test_calibrated_intervals_hold_as_often_as_they_say(sd):
    rng = np.random.default_rng(7)
    scale = scale_from(ledger(rng, sd))
    predicted, _, _, measured = ledger(rng, sd, 2000).T
    held = np.mean(np.abs(np.log(measured / predicted)) <= scale * np.log(1.1))
    assert 0.86 < held < 0.94


def test_few_surprises_widen_but_little():
    assert 1.0 < scale_from(np.array([[1.0, 0.9, 1.1, 2.0]] * 3)) < 2.0
