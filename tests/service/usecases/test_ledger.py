"""Tests the ledger: predictions, the measurements that followed, and how they calibrate intervals."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, overlapping, spec
from tula_service.analysis.transfer import EarlierEvidence
from tula_service.usecases import jobs, ledger
from tula_service.usecases.access import ANONYMOUS


def test_the_ledger_keeps_every_recommendation_and_cannot_be_changed(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    before = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert [entry.basis for entry in before][-1] == "prior"
    assert before[0].recommendation_id == cluster.recommendation(job_id).id
    patch = wire.JobPatch(prices={"default": wire.Price(usd_per_node_hour=6.0)})
    jobs.change(cluster.store, ANONYMOUS, job_id, patch)
    after = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert after[1:] == before
    assert after[0].prices["default"]["usd_per_node_hour"] == 6.0  # type: ignore[index]
    with pytest.raises(sa.exc.DatabaseError), cluster.store.transaction() as tx:
        tx.connection.execute(sa.text("UPDATE ledger SET basis = 'profiled'"))


def test_training_is_entered_with_its_prediction_and_widens_intervals_that_were_too_narrow(
    profiled: tuple[Cluster, str],
) -> None:
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    width = chosen.step_time_s.high / chosen.step_time_s.low
    for _ in range(4):
        run = cluster.train(job_id, chosen.configuration)
        cluster.send(run, [1.3 * overlapping(chosen.configuration)] * 4)
        cluster.patch(run.id, "succeeded")
    entries = [entry for entry in ledger.entries(cluster.store, ANONYMOUS, job_id).entries if entry.run_id]
    assert len(entries) == 4
    newest = entries[-1]
    assert newest.measured_step_time_s == pytest.approx(1.3 * overlapping(chosen.configuration))
    assert newest.predicted_step_time_s is not None
    assert newest.error == pytest.approx(newest.measured_step_time_s / newest.predicted_step_time_s.value - 1)
    assert newest.within_interval is False
    assert cluster.job(job_id).prediction_error is not None
    other = cluster.register(spec(epochs=2)).job.id
    cluster.work(other)
    again = cluster.recommendation(other).candidates
    (same,) = [c for c in again if c.configuration == chosen.configuration]
    assert same.step_time_s.high / same.step_time_s.low > width


def test_a_training_is_entered_with_the_recommendation_that_it_follows_not_with_the_newest(
    profiled: tuple[Cluster, str],
) -> None:
    cluster, job_id = profiled
    own, other = cluster.recommendation(job_id), cluster.recommendation(job_id, "cost")
    assert own.chosen is not None
    assert other.chosen is not None
    assert own.chosen.configuration != other.chosen.configuration
    for followed in (own, other):
        run = cluster.train(job_id, followed.chosen.configuration)  # type: ignore[union-attr]
        cluster.send(run, [overlapping(run.configuration)] * 4)
        cluster.patch(run.id, "succeeded")
    kept = ledger.entries(cluster.store, ANONYMOUS, job_id).entries
    assert {e.recommendation_id for e in kept if e.run_id is not None} == {own.id, other.id}
    neither = next(
        c.configuration
        for c in own.candidates
        if c.configuration not in {own.chosen.configuration, other.chosen.configuration}
    )
    run = cluster.train(job_id, neither)
    cluster.send(run, [overlapping(run.configuration)] * 4)
    cluster.patch(run.id, "succeeded")
    assert all(e.run_id != run.id for e in ledger.entries(cluster.store, ANONYMOUS, job_id).entries)


def test_calibration_learns_from_the_width_before_calibration(
    profiled: tuple[Cluster, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, job_id = profiled
    own = cluster.recommendation(job_id).chosen
    assert own is not None
    # A promise twice as wide as the model's own leaves a pair half as wide: else widening undoes itself as soon as
    # widened promises come true.
    monkeypatch.setattr(EarlierEvidence, "interval_scale", 2.0)
    with cluster.store.transaction() as tx:
        tx.jobs.bump(job_id)
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    promised = ledger.entries(cluster.store, ANONYMOUS, job_id).entries[0].predicted_step_time_s
    assert promised is not None
    assert promised.high / promised.value == pytest.approx((own.step_time_s.high / own.step_time_s.value) ** 2)
    # What was learnt since the promise was made changes nothing of how it was made.
    run = cluster.train(job_id, chosen.configuration)
    monkeypatch.setattr(EarlierEvidence, "interval_scale", 7.0)
    cluster.send(run, [overlapping(chosen.configuration)] * 4)
    cluster.patch(run.id, "succeeded")
    with cluster.store.reading() as tx:
        ((value, low, high, measured),) = tx.posteriors.prediction_pairs(job_id)
    assert (value, measured) == pytest.approx((promised.value, overlapping(chosen.configuration)))
    assert value / low == pytest.approx((promised.value / promised.low) ** 0.5)
    assert high / value == pytest.approx((promised.high / promised.value) ** 0.5)


def test_samples_that_say_the_same_do_not_fill_the_ledger(profiled: tuple[Cluster, str]) -> None:
    cluster, job_id = profiled
    chosen = cluster.recommendation(job_id).chosen
    assert chosen is not None
    run = cluster.train(job_id, chosen.configuration)
    before = len(ledger.entries(cluster.store, ANONYMOUS, job_id).entries)
    for _ in range(6):
        cluster.send(run, cluster.times(run.configuration, 20))
        cluster.recommendation(job_id)
    assert len(ledger.entries(cluster.store, ANONYMOUS, job_id).entries) <= before + 1
