"""Small messages between ranks through the stores that torch has, old ones included."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tula_agent.channel import RING, Channel, Meeting


class Old:
    """A store as torch 2.2 has it: it cannot be asked for a key."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if name == "check":
            raise AttributeError(name)
        return getattr(self._store, name)


def stores(folder: Path) -> dict[str, Any]:
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = {"hash": dist.HashStore(), "file": dist.FileStore(str(folder / "store"), 1), "tcp": tcp}
    return made | {"prefix": dist.PrefixStore("p", made["tcp"])}


@pytest.mark.parametrize("age", [Old, lambda store: store], ids=["2.2", "now"])
@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_messages_arrive_once_and_in_order_and_nothing_is_there_before_it_was_set(
    tmp_path: Path, kind: str, age: Any
) -> None:
    store = age(stores(tmp_path)[kind])
    first, second = Channel(store, "s/", 0, 2), Channel(store, "s/", 1, 2)
    assert not first.has("word")
    assert not first.has("word")  # asking sets nothing
    assert first.wait("word", 0.01) is None
    second.set("word", [1, "two"])
    assert first.has("word")
    assert not first.has("word", "other")
    assert first.get("word") == [1, "two"]
    assert first.collect(1) == []
    for number in range(RING + 5):
        second.post(number)
        if number % 10 == 9 or number == RING + 4:
            start = number - number % 10
            assert first.collect(1) == list(range(start, number + 1))


class Second(Meeting):
    """What the second of two ranks has made of a group with the store `group`; it connects once it `may_connect`."""

    def __init__(self, group: Any) -> None:
        self._prefix, self._place = "tula/", (1, 2)
        self._lock = threading.Lock()
        self._channel, self._lost = None, False
        self._group = weakref.ref(group)
        self.group, self.hosted = group, dist.HashStore()
        Channel(self.hosted, "tula/", 0, 2).set("open", True)
        self.connecting, self.may_connect, self.reachable = threading.Event(), threading.Event(), True

    def _connect(self, host: str, port: int, within_s: float) -> Channel:  # noqa: ARG002
        self.connecting.set()
        assert self.may_connect.wait(10)
        if not self.reachable:
            raise RuntimeError(f"{host}:{port} cannot be reached")
        return Channel(self.hosted, self._prefix, *self._place)


def test_a_thread_that_may_wait_gets_the_channel_that_another_is_connecting() -> None:
    """Else a rank whose shipping thread came first would not say that it is there, and the first rank would wait."""
    meeting = Second(dist.HashStore())
    meeting._in_group(meeting.group).set("address", [["first", 1]])
    got: list[Channel | None] = []
    shipping = threading.Thread(target=meeting.channel)
    training = threading.Thread(target=lambda: got.append(meeting.channel(10.0)))
    shipping.start()
    assert meeting.connecting.wait(10)
    assert meeting.channel() is None  # who may not wait comes again
    training.start()
    training.join(0.2)
    assert training.is_alive()
    meeting.may_connect.set()
    for thread in (shipping, training):
        thread.join(10)
    assert got
    assert got[0] is not None
    assert got[0] is meeting.channel()


def test_what_cannot_be_reached_is_tried_once() -> None:
    meeting = Second(dist.HashStore())
    meeting._in_group(meeting.group).set("address", [["first", 1]])
    meeting.reachable = False
    meeting.may_connect.set()
    with pytest.raises(RuntimeError, match="first:1"):
        meeting.channel(1.0)
    meeting.reachable = True
    assert meeting.channel(1.0) is None


class First(Meeting):
    """What the first of two ranks makes of a group whose store is `group`, where no torchrun is."""

    def __init__(self, group: Any) -> None:
        self._prefix, self._place = "tula/", (0, 2)
        self._lock = threading.Lock()
        self._channel, self._lost, self._group = None, False, weakref.ref(group)
        self._lead(group)


def test_every_rank_follows_the_first_one_s_choice_past_names_that_lead_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = dist.HashStore()
    # What torchrun's variables name; the first rank could not reach it and has taken a store of its own.
    elsewhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first = First(group)
    leads = first.channel()
    assert leads is not None
    addresses = first._in_group(group).get("address")
    assert addresses[-1][1] == leads._store.port
    first._in_group(group).set("address", [["127.0.0.1", elsewhere.port], ["127.0.0.1", leads._store.port]])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(elsewhere.port))
    second = Second(group)
    second._connect = lambda *address: Meeting._connect(second, *address)  # type: ignore[method-assign]
    follows = second.channel(10.0)
    assert follows is not None
    follows.set("here", 1)
    assert leads.wait("here", 10.0) == 1
