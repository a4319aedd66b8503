"""Small messages between ranks through the stores that torch has, old ones included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tula_agent.channel import RING, Channel


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
