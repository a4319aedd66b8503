"""One rank out of memory: noticed, told, reported with its batch, and every rank ended within the stated time."""
# ruff: noqa: ARG002, ARG005 (fakes take what the real ones take)

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy
import pytest
import torch

from tula_agent.channel import CONNECT_WITHIN_S
from tula_agent.out_of_memory import EXIT_CODE, OutOfMemoryWatch, is_out_of_memory


class Road:
    """The ranks' key-value store, in one process."""

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
    """A look-out whose process end is only noted."""

    def __init__(self, channel, rank=0, **options):
        self.ended, self.reports, self.count, self.step = threading.Event(), [], 0, 0
        self.codes = []
        options.setdefault("exit_within_s", 0.1)
        options.setdefault("look_every_s", 0.01)
        ask = channel if callable(channel) else lambda within_s: channel
        self.watch = OutOfMemoryWatch(
            None if channel is None else ask,
            rank=rank,
            report=lambda message, batch: self.reports.append((message, batch)),
            batch_size=lambda: 64,
            steps=lambda: self.step,
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
def test_every_usual_wording_is_known(error):
    assert is_out_of_memory(error)


def test_real_allocations_that_fail_are_known():
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_error:
        numpy.ones(2**60, dtype=numpy.uint8)
    assert is_out_of_memory(torch_error.value)
    assert is_out_of_memory(numpy_error.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("memory")])
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_the_others_end_within_the_stated_time_and_the_batch_is_reported_once(capsys):
    road = Road()
    ranks = [Rank(road, rank) for rank in range(3)]
    ranks[1].watch.tell("CUDA out of memory")
    ranks[1].watch.tell("again")
    assert all(rank.ended.wait(5) for rank in ranks)
    assert [rank.codes for rank in ranks] == [[EXIT_CODE]] * 3
    assert [rank.reports for rank in ranks] == [[], [("CUDA out of memory", 64)], []]
    said = capsys.readouterr().err
    assert "tula: rank 1 ran out of memory at a local batch of 64" in said
    assert "tula: rank 1 ran out of memory, so rank 2 ends too" in said


def test_a_single_rank_is_reported_and_left_to_the_script():
    rank = Rank(None)
    rank.watch.tell(None, 128)
    assert rank.reports == [(None, 128)]
    assert not rank.ended.wait(0.3)


def test_an_error_of_the_allocator_that_the_script_kept_to_itself_counts_in_a_profiling_run():
    rank = Rank(Road())
    rank.count = 1
    assert rank.ended.wait(5)
    assert rank.reports == [("CUDA out of memory, caught by the script.", 64)]


def test_a_training_that_goes_on_after_catching_the_error_is_left_alone():
    rank = Rank(Road(), stalled_s=0.2)
    rank.count = 1
    time.sleep(0.05)
    rank.step = 2  # the script went on with a smaller batch
    assert not rank.ended.wait(0.5)
    rank.count = 2  # and now it does not go on
    assert rank.ended.wait(5)


def test_a_store_that_is_gone_does_not_keep_the_rank_alive():
    rank = Rank(Broken())
    rank.watch.tell("no memory")
    assert rank.ended.wait(5)
    assert rank.reports == [("no memory", 64)]


def test_a_look_out_that_was_closed_stays_silent():
    road = Road()
    rank = Rank(road)
    rank.watch.close(5)
    time.sleep(0.05)
    road.set("out_of_memory", {"rank": 1, "local_batch_size": 64})
    assert not rank.ended.wait(0.3)


class Hosted(Road):
    """A store that closes when the rank that hosts it holds it no more."""

    def __init__(self, world_size=2):
        super().__init__(world_size)
        self.asked = threading.Event()

    def has(self, *keys):
        self.asked.set()
        return super().has(*keys)


def test_the_store_stays_open_until_the_others_have_heard():
    """The first rank hosts it, and its report lets go of the way there."""
    road = Hosted()
    way = [road]
    first = Rank(lambda within_s: way[0] if way else None, 0, look_every_s=5.0, exit_within_s=10.0)
    first.watch._report = lambda message, batch: way.clear()
    first_ends = threading.Thread(target=first.watch.tell, args=("no memory",))
    first_ends.start()
    assert road.asked.wait(5)  # it waits for a word, with its own way gone
    assert not way
    assert first_ends.is_alive()
    second = Rank(road, 1)
    assert second.ended.wait(5)
    first_ends.join(5)
    assert not first_ends.is_alive()
    held = weakref.ref(road)
    del road, second, first_ends
    first.watch.close(0.0)
    del first
    gc.collect()
    assert held() is not None  # the timer that will end this process holds it


def test_ranks_without_an_agent_are_not_waited_for_longer_than_two_looks():
    rank = Rank(Road(), 0)
    rank.watch.tell("no memory")
    assert rank.ended.wait(5)
    assert rank.reports == [("no memory", 64)]


def test_in_the_first_step_the_way_to_the_others_is_waited_for(capsys):
    road, asked = Road(1), []

    def way(within_s):
        asked.append(within_s)
        return road if within_s else None

    rank = Rank(way)
    rank.watch.tell("no memory")
    assert rank.ended.wait(5)
    assert asked[-1] == CONNECT_WITHIN_S
    assert road.has("out_of_memory")
    nobody = Rank(lambda within_s: None)
    nobody.watch.tell("no memory")
    assert "the other ranks could not be told: there is no way to them" in capsys.readouterr().err
    assert nobody.reports == [("no memory", 64)]
