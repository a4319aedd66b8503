"""Tests that an out-of-memory error on one rank is reported with its batch, and that every rank ends in time."""
# ruff: noqa: ARG002, ARG005 (fakes take what the real ones take)

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy
import pytest
import torch

from tula_agent.oom_watch import EXIT_CODE, OomWatch, is_out_of_memory
from tula_agent.rank_channel import CONNECT_WITHIN_S


class FakeStore:
    """A stand-in for the key-value store of the ranks, in one process."""

    def __init__(self, world_size=3):
        self.values, self.world_size = {}, world_size

    def set(self, key, value):
        self.values[key] = value

    def has(self, *keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


class Broken:
    def set(self, key, value):
        raise RuntimeError("store is gone")

    has = get = lambda self, *keys: (_ for _ in ()).throw(RuntimeError("store is gone"))


class Rank:
    """A rank with a watch that records the end of its process instead of ending it."""

    def __init__(self, channel, rank=0, **options):
        self.ended, self.reports, self.count = threading.Event(), [], 0
        self.batches, self.in_step = 8, True
        self.codes = []
        options.setdefault("exit_within_s", 0.1)
        options.setdefault("look_every_s", 0.01)
        ask = channel if callable(channel) else lambda within_s: channel
        options.setdefault("report", lambda message, batch: self.reports.append((message, batch)))
        self.watch = OomWatch(
            None if channel is None else ask,
            rank=rank,
            batch_size=lambda: 64,
            progress=lambda: (self.batches, self.in_step),
            count=lambda: self.count,
            end=self.end,
            **options,
        )
        self.watch.start()

    def end(self, code):
        self.codes.append(code)
        self.ended.set()


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_usual_out_of_memory_errors_are_recognised(error):
    assert is_out_of_memory(error)


def test_real_failed_allocations_are_recognised():
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_error:
        numpy.ones(2**60, dtype=numpy.uint8)
    assert is_out_of_memory(torch_error.value)
    assert is_out_of_memory(numpy_error.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("memory")])
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_all_ranks_end_and_the_batch_is_reported_once(capsys):
    store = FakeStore()
    ranks = [Rank(store, rank) for rank in range(3)]
    ranks[1].watch.notify("CUDA out of memory")
    ranks[1].watch.notify("again")
    assert all(rank.ended.wait(60) for rank in ranks)
    assert [rank.codes for rank in ranks] == [[EXIT_CODE]] * 3
    assert [rank.reports for rank in ranks] == [[], [("CUDA out of memory", 64)], []]
    said = capsys.readouterr().err
    assert "tula: rank 1 ran out of memory at a local batch of 64" in said
    assert "tula: rank 1 ran out of memory, so rank 2 ends too" in said


def test_a_single_rank_reports_and_is_not_ended():
    rank = Rank(None)
    rank.watch.notify(None, 128)
    assert rank.reports == [(None, 128)]
    assert not rank.ended.wait(0.3)


def two_ranks(**options):
    """Return two ranks in the middle of a step; the first rank has counted an error."""
    store = FakeStore(2)
    ranks = [Rank(store, rank, stalled_s=0.1, **options) for rank in range(2)]
    ranks[0].count = 1
    return ranks


def test_an_error_that_a_script_caught_ends_ranks_that_stand_still_in_a_step():
    ranks = two_ranks()
    assert all(rank.ended.wait(60) for rank in ranks)
    assert ranks[0].reports == [("CUDA out of memory, caught by the script.", 64)]


def test_ranks_that_each_counted_an_error_in_the_same_step_end_too():
    store = FakeStore(2)
    ranks = [Rank(store, rank, stalled_s=0.5) for rank in range(2)]
    for rank in ranks:
        rank.count = 1
    assert all(rank.ended.wait(60) for rank in ranks)
    reports = ranks[0].reports + ranks[1].reports
    assert set(reports) == {("CUDA out of memory, caught by the script.", 64)}


@pytest.mark.parametrize(
    ("batches", "in_step"), [((8, 8), (True, False)), ((8, 8), (False, True)), ((2, 8), (True, True))]
)
def test_an_error_ends_nothing_while_a_rank_evaluates_or_compiles_its_first_step(batches, in_step):
    """Either one of the two ranks evaluates outside its step, or a rank is still selecting kernels."""
    ranks = two_ranks()
    for rank, count, inside in zip(ranks, batches, in_step, strict=True):
        rank.batches, rank.in_step = count, inside
    assert not ranks[0].ended.wait(0.5)
    assert not ranks[1].ended.is_set()
    assert [rank.reports for rank in ranks] == [[], []]


def test_a_single_rank_needs_no_thread():
    before = set(threading.enumerate())
    rank = Rank(None, stalled_s=0.1)
    assert set(threading.enumerate()) <= before
    rank.watch.close(5)
    assert rank.reports == []


def test_a_training_whose_batches_go_on_after_an_error_is_not_ended():
    ranks = two_ranks()
    for _ in range(50):
        for rank in ranks:
            rank.batches += 1
        assert not ranks[0].ended.wait(0.02)
    assert ranks[0].reports == []
    ranks[0].count = 2  # and now it does not go on
    assert all(rank.ended.wait(60) for rank in ranks)


def test_a_rank_stands_still_only_after_ten_times_its_longest_step():
    ranks = two_ranks()
    for rank in ranks:
        rank.count = 0
    ranks[0].ended.wait(0.3)  # a step of this length
    for rank in ranks:
        rank.batches += 1
    ranks[0].ended.wait(0.05)
    ranks[0].count = 1
    assert not ranks[0].ended.wait(1.0)
    assert all(rank.ended.wait(60) for rank in ranks)


def test_a_store_that_is_gone_does_not_keep_the_rank_alive():
    rank = Rank(Broken())
    rank.watch.notify("no memory")
    assert rank.ended.wait(60)
    assert rank.reports == [("no memory", 64)]


def test_a_closed_watch_ends_nothing():
    store = FakeStore()
    rank = Rank(store)
    rank.watch.close(5)
    time.sleep(0.05)
    store.set("out_of_memory", {"rank": 1, "local_batch_size": 64})
    assert not rank.ended.wait(0.3)


class Hosted(FakeStore):
    """A store that closes when the rank that hosts it drops its last reference."""

    def __init__(self, world_size=2):
        super().__init__(world_size)
        self.asked = threading.Event()

    def has(self, *keys):
        self.asked.set()
        return super().has(*keys)


def test_the_store_stays_open_until_the_other_ranks_acknowledge():
    """The first rank hosts the store, and its report drops the reference to the channel."""
    store = Hosted()
    way = [store]
    first = Rank(
        lambda within_s: way[0] if way else None,
        0,
        look_every_s=5.0,
        exit_within_s=10.0,
        report=lambda message, batch: way.clear(),
    )
    first_ends = threading.Thread(target=first.watch.notify, args=("no memory",))
    first_ends.start()
    assert store.asked.wait(60)  # it waits for an acknowledgement
    assert not way
    assert first_ends.is_alive()
    second = Rank(store, 1)
    assert second.ended.wait(60)
    first_ends.join(60)
    assert not first_ends.is_alive()
    held = weakref.ref(store)
    del store, second, first_ends
    first.watch.close(0.0)
    del first
    gc.collect()
    assert held() is not None  # the timer that will end this process holds it


def test_a_rank_waits_at_most_two_looks_for_ranks_without_an_agent():
    rank = Rank(FakeStore(), 0)
    rank.watch.notify("no memory")
    assert rank.ended.wait(60)
    assert rank.reports == [("no memory", 64)]


def test_a_notice_in_the_first_step_waits_for_the_connection(capsys):
    store, asked = FakeStore(1), []

    def way(within_s):
        asked.append(within_s)
        return store if within_s else None

    rank = Rank(way)
    rank.watch.notify("no memory")
    assert rank.ended.wait(60)
    assert asked[-1] == CONNECT_WITHIN_S
    assert store.has("out_of_memory")
    unconnected = Rank(lambda within_s: None)
    unconnected.watch.notify("no memory")
    assert "the other ranks could not be notified: there is no connection to them" in capsys.readouterr().err
    assert unconnected.reports == [("no memory", 64)]
