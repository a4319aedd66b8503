"""Work after an answer: once per run at a time, bounded, and its errors reach no request."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from tula_service.background import BackgroundQueue

Held = tuple[BackgroundQueue, threading.Event, list[str]]


@pytest.fixture
def held() -> Held:
    """A queue of at most two items whose thread works for run `a` until the event is set, and what was done."""
    queue, released, done = BackgroundQueue(max_waiting=2), threading.Event(), list[str]()
    at_work = threading.Event()

    def work() -> None:
        at_work.set()
        assert released.wait(60)
        done.append("a")

    queue.enqueue("a", work)
    assert at_work.wait(60)
    return queue, released, done


def test_work_that_waits_for_a_run_is_done_once(held: Held) -> None:
    queue, released, done = held
    finished = threading.Event()
    for name in ("a", "b", "b"):
        queue.enqueue(name, lambda name=name: (done.append(name), finished.set()))
    released.set()
    assert finished.wait(60)
    assert done == ["a", "b"]
    again = threading.Event()
    queue.enqueue("a", lambda: again.set())
    assert again.wait(60), "work that was done may be enqueued again"
    queue.close()


def test_work_beyond_the_bound_is_dropped(held: Held) -> None:
    queue, released, done = held
    finished = threading.Event()
    queue.enqueue("b", lambda: finished.set())
    queue.enqueue("c", lambda: done.append("c"))
    released.set()
    assert finished.wait(60)
    queue.close()
    assert done == ["a"]


def test_closing_finishes_the_current_item_and_drops_the_others(held: Held) -> None:
    queue, released, done = held
    queue.enqueue("b", lambda: done.append("b"))
    closing = threading.Thread(target=queue.close)
    closing.start()
    closing.join(0.2)  # long enough to cancel what waits, while the current item is held
    assert closing.is_alive()
    released.set()
    closing.join(60)
    queue.enqueue("c", lambda: done.append("c"))
    assert done == ["a"]


def test_work_needs_no_new_thread_when_it_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has stored its data does not fail where no thread can be started."""
    queue, finished = BackgroundQueue(), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        queue.enqueue("a", lambda: finished.set())
        assert finished.wait(60)
    queue.close()
