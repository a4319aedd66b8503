"""What is said of a training that read more or less than its job was told."""

from __future__ import annotations

import pytest

import tula_wire as wire
from tests.service.usecases.cluster import Cluster, spec

ONE = wire.Configuration(num_nodes=1, ranks_per_node=2, local_batch_size=128)  # 256 examples a step


@pytest.mark.parametrize(
    ("size", "epochs", "said"),
    [(2560, 2, None), (2560, 3, None), (2560, 4, "2 passes"), (2560, 1, "2 passes"), (100_000, 10, "0.0512 passes")],
)
def test_a_training_is_held_against_the_epochs_and_the_data_of_its_job(
    cluster: Cluster, size: int, epochs: float, said: str | None
) -> None:
    job_id = cluster.register(spec(dataset={"size": size}, epochs=epochs)).job.id
    run = cluster.train(job_id, ONE)
    cluster.send(run, [0.1] * 20)
    message = cluster.patch(run.id, "succeeded").message
    if said is None:
        assert message is None
    else:
        assert said in (message or "")
        assert f"{epochs:g} epochs" in (message or "")
        assert "correct epochs or dataset.size" in (message or "")


def test_one_that_may_have_gone_on_from_a_checkpoint_may_be_short_but_never_long(cluster: Cluster) -> None:
    job_id = cluster.register(spec(dataset={"size": 2560}, epochs=4)).job.id
    first = cluster.train(job_id, ONE)
    cluster.send(first, [0.1] * 20)
    cluster.patch(first.id, "failed", message="It was killed.")
    second = cluster.train(job_id, ONE)
    cluster.send(second, [0.1] * 20)
    assert cluster.patch(second.id, "succeeded").message is None
    third = cluster.train(job_id, ONE)
    cluster.sequence = 0
    cluster.send(third, [0.1] * 200)
    assert "20 passes" in (cluster.patch(third.id, "succeeded").message or "")


def test_what_the_launcher_says_of_a_run_and_a_training_that_told_nothing_are_left_alone(cluster: Cluster) -> None:
    job_id = cluster.register(spec()).job.id
    run = cluster.train(job_id, ONE)
    assert cluster.patch(run.id, "succeeded").message is None
    told = cluster.train(job_id, ONE)
    cluster.send(told, [0.1] * 3)
    assert cluster.patch(told.id, "succeeded", message="As wanted.").message == "As wanted."
