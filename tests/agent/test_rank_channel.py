"""Tests the small messages that ranks exchange through torch's stores."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tula_agent.rank_channel import RING, Channel, RankRendezvous


def stores(folder: Path) -> dict[str, Any]:
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = {"hash": dist.HashStore(), "file": dist.FileStore(str(folder / "store"), 1), "tcp": tcp}
    return made | {"prefix": dist.PrefixStore("p", made["tcp"])}


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_messages_arrive_once_and_in_order_and_nothing_is_there_before_it_was_set(tmp_path: Path, kind: str) -> None:
    store = stores(tmp_path)[kind]
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


class SecondRank(RankRendezvous):
    """The second of two ranks in a group with the store `group_store`; it connects once `may_connect` is set."""

    def __init__(self, group_store: Any) -> None:
        super().__init__(group_store, "tula/", 1, 2)
        self.hosted = dist.HashStore()
        Channel(self.hosted, "tula/", 0, 2).set("open", True)
        self.connecting, self.may_connect, self.reachable = threading.Event(), threading.Event(), True

    def connect(self, host: str, port: int, within_s: float) -> Channel:  # noqa: ARG002
        self.connecting.set()
        assert self.may_connect.wait(60)
        if not self.reachable:
            raise RuntimeError(f"{host}:{port} cannot be reached")
        return Channel(self.hosted, "tula/", 1, 2)


def publish(group_store: Any, addresses: list[list[Any]]) -> None:
    """Publish the addresses as the first rank does."""
    Channel(group_store, "tula/", 0, 2).set("address", addresses)


def test_a_thread_that_may_wait_gets_the_channel_that_another_is_connecting() -> None:
    """Otherwise a rank would not join if its shipping thread came first, and the first rank would wait for it."""
    group_store = dist.HashStore()
    rendezvous = SecondRank(group_store)
    publish(group_store, [["first", 1]])
    got: list[Channel | None] = []
    shipping = threading.Thread(target=rendezvous.channel)
    training = threading.Thread(target=lambda: got.append(rendezvous.channel(60.0)))
    shipping.start()
    assert rendezvous.connecting.wait(60)
    assert rendezvous.channel() is None  # without a wait there is none yet
    training.start()
    training.join(0.2)
    assert training.is_alive()
    rendezvous.may_connect.set()
    for thread in (shipping, training):
        thread.join(60)
    assert got
    assert got[0] is not None
    assert got[0] is rendezvous.channel()


def test_an_address_that_cannot_be_reached_is_tried_once() -> None:
    group_store = dist.HashStore()
    rendezvous = SecondRank(group_store)
    publish(group_store, [["first", 1]])
    rendezvous.reachable = False
    rendezvous.may_connect.set()
    with pytest.raises(RuntimeError, match="first:1"):
        rendezvous.channel(1.0)
    rendezvous.reachable = True
    assert rendezvous.channel(1.0) is None


def test_every_rank_uses_the_first_ranks_store_and_skips_addresses_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    group_store = dist.HashStore()
    # What torchrun's variables name; the first rank could not reach it and hosts a store instead.
    elsewhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    leads = RankRendezvous(group_store, "tula/", 0, 2).channel()
    assert leads is not None
    port = Channel(group_store, "tula/", 0, 2).get("address")[-1][1]
    assert port != elsewhere.port
    publish(group_store, [["127.0.0.1", elsewhere.port], ["127.0.0.1", port]])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(elsewhere.port))
    follows = RankRendezvous(group_store, "tula/", 1, 2).channel(60.0)
    assert follows is not None
    follows.set("message", 1)
    assert leads.wait("message", 10.0) == 1
