"""What is left of a training, and what a second of it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import tula_wire as wire
from tula_service.analysis import job_spec
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.pricing import Training, price
from tula_service.store import NewSamples
from tula_wire import Configuration

__all__ = ["epochs_done", "examples_left", "usd_per_s"]

_ONE_SECOND = Interval(1.0, 1.0, 1.0)


def epochs_done(spec: wire.JobSpec, configuration: Configuration, new: NewSamples) -> float:
    """Passes over the data that the training has behind it at the newest of these samples.

    A process counts its steps from zero; what the checkpoint that it went on from had behind it is told in passes,
    which mean the same at every batch. Where nothing is told, nothing is taken to be behind it.
    """
    steps = int(np.max(new.columns.step)) + 1
    return (new.epochs_before or 0.0) + steps * configuration.global_batch_size / spec.dataset.size


def examples_left(spec: wire.JobSpec, configuration: Configuration, new: NewSamples) -> float:
    """Examples that the training still has to see, E * D at first."""
    return max(0.0, spec.epochs - epochs_done(spec, configuration, new)) * spec.dataset.size


def usd_per_s(spec: wire.JobSpec, configuration: Configuration, peak_bytes: float | None) -> float | None:
    """What a second of this configuration costs, its memory included; None where a price or the memory is not known.

    On demand where that price is known and on spot capacity otherwise. `peak_bytes` is of one rank.
    """
    if not job_spec.has_prices(spec):
        return None
    offer = {**job_spec.spot_offers_of(spec), **job_spec.offers_of(spec)}[configuration.instance_type]
    if offer.usd_per_gb_hour and peak_bytes is None:
        return None
    peak = None if peak_bytes is None else Interval(peak_bytes, peak_bytes, peak_bytes)
    one_step = Training(dataset_size=float(configuration.global_batch_size))
    # A second that has passed, so nothing is added for interruptions.
    offers = {configuration.instance_type: replace(offer, spot=None)}
    (found,) = price([configuration], [_ONE_SECOND], one_step, offers, peak_bytes=[peak])
    return float(found.cost_usd.mean)
