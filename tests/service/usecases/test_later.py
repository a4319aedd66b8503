"""Work that requests leave behind: once a run at a time, bounded, and never anybody's error but its own."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from tula_service.store import Store
from tula_service.usecases import later
from tula_service.usecases.later import Later


@pytest.fixture
def held(sqlite_store: Store) -> tuple[Later, threading.Event, list[str]]:
    """One whose thread is at work for `a` until the event is set, and what was done."""
    todo, released, done = Later(sqlite_store), threading.Event(), list[str]()
    at_work = threading.Event()

    def work(_: Store) -> None:
        at_work.set()
        assert released.wait(60)
        done.append("a")

    todo.do("a", work)
    assert at_work.wait(60)
    return todo, released, done


def test_what_waits_for_a_run_is_done_once(held: tuple[Later, threading.Event, list[str]]) -> None:
    todo, released, done = held
    finished = threading.Event()
    for name in ("a", "b", "b"):
        todo.do(name, lambda _, name=name: done.append(name))
    todo.do("c", lambda _: finished.set())
    released.set()
    assert finished.wait(60)
    assert done == ["a", "b"]
    again = threading.Event()
    todo.do("a", lambda _: again.set())
    assert again.wait(60), "what was done may be asked for again"
    todo.close()


def test_no_more_waits_than_is_allowed(
    held: tuple[Later, threading.Event, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    todo, released, done = held
    monkeypatch.setattr(later, "_MOST_WAITING", 2)
    finished = threading.Event()
    todo.do("b", lambda _: finished.set())
    todo.do("c", lambda _: done.append("c"))
    released.set()
    assert finished.wait(60)
    todo.close()
    assert done == ["a"]


def test_an_end_finishes_what_is_at_work_and_takes_nothing_more(
    held: tuple[Later, threading.Event, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    todo, released, done = held
    submit, given_up = todo._thread.submit, threading.Event()

    def noting(*work: Any) -> None:
        submit(*work).add_done_callback(lambda _: given_up.set())

    monkeypatch.setattr(todo._thread, "submit", noting)
    todo.do("b", lambda _: done.append("b"))
    closing = threading.Thread(target=todo.close)
    closing.start()
    given_up.wait(10)  # while the other is still at work
    released.set()
    closing.join(60)
    todo.do("c", lambda _: done.append("c"))
    assert done == ["a"]


def test_work_for_which_no_thread_was_to_be_had_may_be_asked_for_again(
    sqlite_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo, done, finished = Later(sqlite_store), list[str](), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        todo.do("a", lambda _: done.append("refused"))
    todo.do("a", lambda _: done.append("a"))
    todo.do("b", lambda _: finished.set())
    assert finished.wait(60)
    todo.close()
    assert done == ["a"]
