"""A side road between the ranks of a run that is no collective: small messages in the job's own key-value store."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tula_agent.config import AgentConfig

__all__ = ["Channel", "connect"]

_stores: Any = dist  # torch builds without distributed lack these names

RING = 64
"""Messages of one sender that the store holds at most; older ones are overwritten."""
CONNECT_WITHIN_S = 5.0
_NO_JSON = "?"
"""No message reads so. Stores of torch 2.2 cannot be asked whether they have a key, but answer this to a comparison
with it where they do not, and set nothing then."""


class Channel:
    """Messages between ranks. Every key is private to one session of one start of one run.

    `set` and `get` are round trips of about 50 us to the store that the process group itself met through. Raises
    what the store raises (RuntimeError and its kin) when it is gone; callers are under a guard.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int, group_store: Any = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._group_store = group_store  # the first rank may host the store: a destroyed group must not take it along
        self._prefix = prefix
        self._sent = 0
        self._next = [0] * world_size

    def set(self, key: str, value: Any) -> None:
        """Publish `value` (JSON) under `key`."""
        self._store.set(self._prefix + key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        """True when all of `keys` have been published; never waits."""
        names = [self._prefix + key for key in keys]
        if hasattr(self._store, "check"):
            return bool(self._store.check(names))
        return all(self._store.compare_set(name, _NO_JSON, _NO_JSON) != _NO_JSON.encode() for name in names)

    def wait(self, key: str, within_s: float) -> Any:
        """The value of `key`, or None when it does not appear `within_s` seconds."""
        ends = time.monotonic() + within_s
        pause = 0.0002
        while not self.has(key):
            if time.monotonic() > ends:
                return None
            time.sleep(pause)
            pause = min(0.01, pause * 1.5)
        return self.get(key)

    def get(self, key: str) -> Any:
        """The value of a published `key`."""
        return json.loads(self._store.get(self._prefix + key))

    def post(self, message: Any) -> None:
        """Leave `message` for the first rank; the last RING of each rank are kept, so nothing grows."""
        self.set(f"box/{self.rank}/{self._sent % RING}", [self._sent, message])
        self._sent += 1

    def collect(self, rank: int) -> list[Any]:
        """Messages of `rank` since the last call, oldest first; never waits."""
        messages = []
        while self.has(f"box/{rank}/{self._next[rank] % RING}"):
            number, message = self.get(f"box/{rank}/{self._next[rank] % RING}")
            if number < self._next[rank]:
                break  # what stood here a round ago
            messages.append(message)
            self._next[rank] = number + 1
        return messages


def connect(config: AgentConfig, session: int) -> Channel | None:
    """A channel between the ranks of the default process group; None where there is one rank or no store.

    Under env:// (torchrun, SLURM scripts) it is a connection of our own to the store at MASTER_ADDR, so that nothing
    waits for a lock that training holds. Otherwise the group's own store serves, which torch reaches only privately.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    store = _own_client() or _group_store()
    if store is None:
        return None
    prefix = f"tula/{config.run_id}/{config.restart}/{session}/"
    return Channel(store, prefix, dist.get_rank(), dist.get_world_size(), _group_store())


def _own_client() -> Any:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or _group_is_tcp()
    if not host or not port.isdigit() or not shared:
        return None
    try:
        return _stores.TCPStore(
            host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_WITHIN_S), wait_for_workers=False
        )
    except (RuntimeError, ValueError, TypeError):
        return None


def _group_store() -> Any:
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    try:
        return getter() if getter is not None else None
    except (RuntimeError, ValueError):
        return None


def _group_is_tcp() -> bool:
    store = _group_store()
    while isinstance(store, _stores.PrefixStore):
        store = getattr(store, "underlying_store", None)
    return isinstance(store, _stores.TCPStore) and getattr(store, "port", None) == int(
        os.environ.get("MASTER_PORT", "0")
    )
