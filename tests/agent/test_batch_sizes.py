"""Tests how the size of a batch is determined: a stated size takes precedence over the shapes of the tensors."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tula_agent import Run
from tula_agent.batches import BatchSizes
from tula_agent.config import read_config


def image(i: int = 0) -> torch.Tensor:
    return torch.zeros(3, 8 + i, 8)


KINDS = {
    "tensor": (lambda n: torch.zeros(n, 8), 8),
    "examples and labels": (lambda n: [torch.zeros(n, 8), torch.zeros(n)], 8),
    "mixup, with its factor": (lambda n: [torch.zeros(n, 3), torch.zeros(n), torch.ones(1)], 8),
    "detection: lists of images and targets": (
        lambda n: (tuple(image(i) for i in range(n)), tuple({"boxes": torch.zeros(9, 4)} for _ in range(n))),
        8,
    ),
    "a list of samples": (lambda n: [(image(), 1) for _ in range(n)], 8),
    "a list of dictionaries": (lambda n: [{"image": image(i)} for i in range(n)], 8),
    "a graph that counts itself": (lambda n: SimpleNamespace(num_graphs=n, x=torch.zeros(137, 4)), 8),
    "time first": (lambda n: (torch.zeros(50, n, 4), torch.zeros(n)), None),
    "a graph": (lambda n: SimpleNamespace(x=torch.zeros(137, 4), edge_index=torch.zeros(2, 400), of=n), None),
    "packed tokens": (lambda n: {"cu_seqlens": torch.zeros(n + 1), "input_ids": torch.zeros(n * 90)}, None),
}
SHORT_ONES_SHOW = set(KINDS) - {"a graph", "packed tokens"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_that_a_loader_states_is_that_of_its_batches_and_a_last_one_is_smaller(kind):
    make, _ = KINDS[kind]
    sizes, loader = BatchSizes(), DataLoader([0] * 21, batch_size=8)
    assert [sizes.of(make(n), loader) for n in (8, 8, 5)] == [8, 8, 5 if kind in SHORT_ONES_SHOW else 8]
    sampler = BatchSampler(SequentialSampler(range(21)), 8, drop_last=False)
    assert BatchSizes().of(make(8), DataLoader([0] * 21, batch_sampler=sampler)) == 8


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_stated_size_a_batch_that_does_not_show_one_has_none(kind):
    make, shown = KINDS[kind]
    assert BatchSizes().of(make(8), [make(8)]) == shown


def test_a_size_that_the_script_states_beats_the_loader():
    batch = {"input_ids": torch.zeros(8, 90)}
    assert BatchSizes(lambda batch: batch["input_ids"].numel()).of(batch, DataLoader([0] * 8, batch_size=8)) == 720
    assert BatchSizes(4).of((torch.zeros(50, 4), torch.zeros(9)), None) == 4


@pytest.fixture
def train(sink, tmp_path):
    """Return a function that loops over batches, with or without an optimizer, and counts samples by batch size."""

    def loop(batches, optimizer=None, environ=None, **stated):
        variables = {"TULA_URL": sink.url, "TULA_RUN_ID": "run-1", "TULA_SPOOL_DIR": str(tmp_path), **(environ or {})}
        run = Run(read_config(variables))
        run.watch(None, optimizer)
        for batch in run.steps(batches, **stated):
            if optimizer is not None:
                optimizer.zero_grad()
                (optimizer.param_groups[0]["params"][0] * batch[0].sum()).sum().backward()
                optimizer.step()
        run.finish()
        return Counter(size for body in sink.samples for size in [body.get("local_batch_size")] * len(body["step"]))

    return loop


def test_sizes_that_vary_count_as_the_batch_of_the_run_and_one_sentence_says_what_to_state(train, caplog):
    tokens = [torch.zeros(200 + 17 * (i % 11), 2) for i in range(40)]
    assert train(tokens, environ={"TULA_LOCAL_BATCH_SIZE": "8"})[8] >= 30
    (said,) = [record.getMessage() for record in caplog.records if "batch size varies" in record.getMessage()]
    assert "run.steps(loader, size=...)" in said
    assert "use the run's batch size" not in caplog.text


def test_a_batch_that_grows_for_good_is_the_usual_one_from_then_on(train):
    sampled = train([torch.zeros(4, 2)] * 20 + [torch.zeros(8, 2)] * 20)
    assert sampled[4] == 20
    assert sampled[8] >= 17


class Counts(torch.optim.SGD):
    """An optimizer that records the batch sizes that the agent reports to it."""

    def __init__(self):
        super().__init__([torch.nn.Parameter(torch.ones(3))], lr=1e-6)
        self.sizes = []

    def observe_batch(self, _, *, size=None, share=None):
        assert share == 1.0
        self.sizes.append(size)

    def next_epoch(self): ...

    def telemetry(self):
        return {}


def test_an_optimizer_that_scales_gets_the_size_that_the_loader_states_and_none_that_is_not_known(train):
    time_first = [torch.zeros(50, 8, 2), torch.zeros(8)]
    stated, unknown = Counts(), Counts()
    train(DataLoader([0] * 64, batch_size=8, collate_fn=lambda _: time_first), stated)
    train([time_first] * 8, unknown)
    assert stated.sizes == [8.0] * 8
    assert unknown.sizes == []


def test_an_evaluation_without_gradients_is_no_epoch_and_no_step():
    run = Run(None)
    with torch.no_grad():
        assert list(run.steps([1, 2, 3])) == [1, 2, 3]
    assert (run.position.epoch, run.position.step) == (0, 0)
    assert len(list(run.steps([1, 2]))) == 2
    assert (run.position.epoch, run.position.step) == (1, 2)


def test_the_result_of_steps_is_the_loader_in_every_other_respect():
    loader = DataLoader([0.0] * 20, batch_size=8)
    steps = Run(None).steps(loader)
    assert len(steps) == 3
    assert steps.sampler is loader.sampler
    assert steps.batch_size == 8
    assert next(steps).shape == (8,)
    with pytest.raises(TypeError):
        len(Run(None).steps(iter([1])))
