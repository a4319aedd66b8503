"""A side road between the ranks of a run that is no collective: small messages in a key-value store.

The store is torchrun's or, where there is none, one that the first rank hosts for this alone: the process group's own
would have to be kept from closing, and a group that is made again at the same address would meet what it left there.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tula_agent.config import AgentConfig

__all__ = ["Channel", "Meeting", "current_group", "placed"]

_stores: Any = dist  # torch builds without distributed lack these names

RING = 64
"""Messages of one sender that the store holds at most; older ones are overwritten."""
CONNECT_WITHIN_S = 5.0
_ADDRESS = "address"
_NO_JSON = "?"
"""No message reads so. Stores of torch 2.2 cannot be asked whether they have a key, but answer this to a comparison
with it where they do not, and set nothing then."""


class Channel:
    """Messages between ranks, from any thread. Every key is private to one session of one start of one run.

    `set` and `get` are round trips of about 50 us. Raises what the store raises (RuntimeError and its kin) when it is
    gone; callers are under a guard.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
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


class Meeting:
    """How the ranks of the default process group come to a channel of theirs: one connection each, for all threads.

    Made by every rank when it begins to train in that group. The first rank then hosts a store on a port of its own
    and leaves its address in the group's store, which torch reaches only privately and which is not kept; under
    torchrun the store of the launcher serves, which outlives every rank.
    """

    def __init__(self, config: AgentConfig, session: str) -> None:
        self._prefix = f"tula/{config.run_id}/{config.restart}/{session}/"
        self._place = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._lost = False
        group = _group_store()
        self._group = None if group is None else weakref.ref(group)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with suppress(RuntimeError, ValueError, KeyError):
                self._channel = self._connect(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self._channel is None and group is not None and self._place[0] == 0:
            store = _stores.TCPStore("localhost", 0, **_OPTIONS, is_master=True)
            self._channel = Channel(store, self._prefix, *self._place)
            self._in_group(group).set(_ADDRESS, [_host_of(group), store.port])

    def channel(self, within_s: float = 0.0) -> Channel | None:
        """The channel, or None as long as the first rank has not said where its store is: not `within_s` seconds."""
        ends = time.monotonic() + within_s
        if self._channel is None and self._lock.acquire(timeout=max(0.0, within_s)):
            try:
                group = None if self._group is None else self._group()
                if self._channel is None and not self._lost and group is not None:
                    address = self._in_group(group).wait(_ADDRESS, ends - time.monotonic())
                    if address is not None:
                        self._reach(address)
            finally:
                self._lock.release()
        return self._channel

    def _reach(self, address: Any) -> None:
        """One try: what cannot be reached now would cost each further one as long."""
        try:
            self._channel = self._connect(*address)
        except Exception:
            self._lost = True
            raise

    def _in_group(self, store: Any) -> Channel:
        return Channel(store, self._prefix, *self._place)

    def _connect(self, host: str, port: int) -> Channel:
        return Channel(_stores.TCPStore(host, port, **_OPTIONS, is_master=False), self._prefix, *self._place)


_OPTIONS: dict[str, Any] = {"timeout": timedelta(seconds=CONNECT_WITHIN_S), "wait_for_workers": False}


def current_group() -> Any:
    """The default process group, or None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def placed(config: AgentConfig) -> AgentConfig:
    """With the place in the process group, where there is one: `mp.spawn` tells it by no variable."""
    if current_group() is None:
        return config
    return replace(config, rank=dist.get_rank(), world_size=dist.get_world_size())


def _group_store() -> Any:
    getter = getattr(dist.distributed_c10d, "_get_default_store", None)
    try:
        return getter() if getter is not None else None
    except (RuntimeError, ValueError):
        return None


def _host_of(store: Any) -> str:
    """Where other ranks reach this one, which hosts the group's store too if that is a TCPStore."""
    while isinstance(store, _stores.PrefixStore):
        store = getattr(store, "underlying_store", None)  # absent in old versions
    if isinstance(store, _stores.TCPStore):
        return str(store.host)
    return os.environ.get("MASTER_ADDR") or socket.gethostname()
