"""Tests that whatever would silently disturb a measurement is refused, left out with one warning, or documented."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.agent.scaling.test_optimizer import batches, loss_of, network, sgd, train
from tula_agent.scaling import Ags, TulaOptimizer


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tula_agent")]


def test_a_small_batch_size_without_a_global_batch_size_is_an_error_at_the_first_step():
    model = network()
    optimizer = TulaOptimizer(sgd(model), small_batch_size=8)
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(ValueError, match="global batch size"):
        optimizer.step()
    optimizer.observe_batch(next(batches(1)))
    optimizer.step()


@pytest.mark.parametrize(("small_batch_size", "said"), [(None, 0), (16, 0), (4, 1)])
def test_one_rank_without_micro_steps_is_told_only_above_the_base_batch(small_batch_size, said, caplog):
    model = network()
    optimizer = TulaOptimizer(sgd(model), global_batch_size=16, small_batch_size=small_batch_size)
    with caplog.at_level(logging.WARNING):
        for batch in batches(4):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert len([each for each in warnings_of(caplog) if "a single rank without accumulation" in each]) == said


@pytest.mark.parametrize(("longer", "said"), [(1.0, 0), (10.0, 1)])
def test_gradients_that_are_regularly_clipped_are_named_once(longer, said, caplog):
    """In every eighth step, gradients are `longer` times as long, as if they came from a second task."""
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    optimizer = TulaOptimizer(sgd(model, lr=1e-4), global_batch_size=64, small_batch_size=8)
    with caplog.at_level(logging.WARNING):
        for step in range(500):
            optimizer.zero_grad()
            for _ in range(4):
                inputs = torch.randn(16, 32)
                loss = F.cross_entropy(model(inputs), inputs[:, :8].argmax(1))
                (loss * (1.0 if step % 8 else longer) / 4).backward()
            optimizer.step()
    assert len([each for each in warnings_of(caplog) if "one step in ten" in each]) == said


def test_clipping_by_value_is_left_out_with_one_warning(caplog):
    model = network()
    optimizer = TulaOptimizer(sgd(model))

    def clip():
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    with caplog.at_level(logging.WARNING):
        train(optimizer, model, batches(8), after_backward=clip)
    assert optimizer.telemetry()["scale"] == 1.0
    (warning,) = warnings_of(caplog)
    assert "clipping by value" in warning
    train(optimizer, model, batches(8))
    assert optimizer.telemetry()["scale"] > 1.0  # what is measured afterwards counts


def test_a_backward_for_each_loss_is_left_out_with_one_warning(caplog):
    trunk, heads = nn.Linear(6, 8), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
    model = nn.ModuleList([trunk, heads])
    optimizer = TulaOptimizer(sgd(model))
    with caplog.at_level(logging.WARNING):
        for inputs, labels in batches(8):
            optimizer.zero_grad()
            hidden = trunk(inputs)
            F.cross_entropy(heads[0](hidden), labels).backward(retain_graph=True)
            F.cross_entropy(heads[1](hidden), labels).backward()
            optimizer.step()
    assert optimizer.telemetry()["scale"] == 1.0
    (warning,) = warnings_of(caplog)
    assert "one for each loss" in warning


def test_two_backwards_over_all_parameters_count_as_two_micro_steps():
    """As documented, two backward passes look like accumulation; a script should add the losses instead."""
    model = network()
    optimizer = TulaOptimizer(sgd(model))
    for batch in batches(8):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        optimizer.step()
    assert optimizer.telemetry()["scale"] > 1.0


def test_reentrant_checkpoints_with_a_shared_module_are_left_out_with_one_warning(caplog):
    shared, head = nn.Linear(6, 6), nn.Linear(6, 4)
    optimizer = TulaOptimizer(sgd(nn.ModuleList([shared, head])))
    with caplog.at_level(logging.WARNING):
        for inputs, labels in batches(8):
            optimizer.zero_grad()
            for part in range(2):
                hidden = inputs[part * 16 : part * 16 + 16].requires_grad_()
                for _ in range(2):
                    hidden = checkpoint(shared, hidden, use_reentrant=True)
                (F.cross_entropy(head(hidden), labels[part * 16 : part * 16 + 16]) / 2).backward()
            optimizer.step()
    assert optimizer.telemetry()["scale"] == 1.0
    (warning,) = warnings_of(caplog)
    assert "reentrant checkpoints" in warning


def test_a_probe_that_never_fits_says_so_once(caplog):
    model = network()
    policy = Ags(model=model, loss=loss_of, steps_per_epoch=2)
    optimizer = TulaOptimizer(sgd(model), policy=policy, small_batch_size=16, global_batch_size=32)
    with caplog.at_level(logging.WARNING):
        for inputs, labels in batches(6):
            optimizer.zero_grad()
            for part in zip(inputs.chunk(4), labels.chunk(4), strict=True):
                optimizer.observe_batch(part)
                (loss_of(model, part) / 4).backward()
            optimizer.step()
    assert optimizer.telemetry()["scale"] == 1.0
    (warning,) = warnings_of(caplog)
    assert "a probe of 16 examples is too large for a micro-step of 8" in warning


def test_policy_measure_reports_the_noise_scale_and_none_measures_nothing():
    model = network()
    measure = TulaOptimizer(sgd(model), policy="measure", global_batch_size=32)
    train(measure, model, batches(10))
    assert measure.telemetry()["gradient_noise_scale"] > 0.0
    assert measure.telemetry()["scale"] == 1.0
    none = TulaOptimizer(sgd(network()), policy="none")
    train(none, model, batches(10))
    assert not {"gradient_noise_scale", "scale", "grad_norm"} & none.telemetry().keys()


@pytest.mark.parametrize("parts", [1, 4])
def test_the_noise_scale_is_in_tokens_where_the_script_counts_them(parts):
    """The agent also observes these batches, but without a size; its observations do not count."""
    scales = []
    for tokens in (None, 7.0):
        model = network()
        optimizer = TulaOptimizer(sgd(model, lr=0.0))
        for inputs, labels in batches(10):
            optimizer.zero_grad()
            chunks = list(zip(inputs.chunk(4), labels.chunk(4), strict=True))
            for chunk in chunks:
                if parts == 4 or chunk is chunks[0]:
                    batch = chunk if parts == 4 else (inputs, labels)
                    optimizer.observe_batch(batch, size=None if tokens is None else tokens * len(batch[0]))
                    if tokens is not None:
                        optimizer.observe_batch(batch)
                (loss_of(model, chunk) / 4).backward()
            optimizer.step()
        scales.append(optimizer.telemetry()["gradient_noise_scale"])
    assert scales[1] == pytest.approx(7.0 * scales[0])
