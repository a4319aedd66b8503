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
from tula_agent.torch_private import default_store

__all__ = ["Channel", "Meeting", "current_group", "placed"]

_stores: Any = dist  # torch builds without distributed lack these names

RING = 64
"""Messages of one sender that the store holds at most; older ones are overwritten."""
CONNECT_WITHIN_S = 5.0
_ADDRESS, _OPEN = "address", "open"
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

    Made by every rank when it begins to train in that group. The first rank then chooses a store for all: torchrun's,
    which outlives every rank, or else one on a port of its own. It leaves where that is in the group's store, which
    torch reaches only privately and which is not kept; the others follow that choice and make none.
    """

    def __init__(self, config: AgentConfig, session: str) -> None:
        self._prefix = f"tula/{config.run_id}/{config.restart}/{session}/"
        self._place = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._lost = False
        group = default_store()
        self._group = None if group is None else weakref.ref(group)
        if group is not None and self._place[0] == 0:
            self._lead(group)

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

    def _lead(self, group: Any) -> None:
        self._channel, addresses = self._choose(group)
        self._channel.set(_OPEN, True)
        self._in_group(group).set(_ADDRESS, addresses)

    def _choose(self, group: Any) -> tuple[Channel, list[tuple[str, int]]]:
        """The first rank's choice, and where others may reach it."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            with suppress(RuntimeError, ValueError, KeyError):
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                return self._connect(*address, CONNECT_WITHIN_S), [address]
        store = _stores.TCPStore("localhost", 0, **_options(CONNECT_WITHIN_S), is_master=True)
        return Channel(store, self._prefix, *self._place), [(host, store.port) for host in _hosts_of(group)]

    def _reach(self, addresses: list[tuple[str, int]]) -> None:
        """One try of each: what cannot be reached now would cost each further one as long."""
        failed = []
        for host, port in addresses:
            why = self._try(host, port, CONNECT_WITHIN_S / len(addresses))
            if why is None:
                return
            failed.append(f"{host}:{port} ({why})")
        self._lost = True
        raise RuntimeError("the first rank's store cannot be reached: " + ", ".join(failed))

    def _try(self, host: str, port: int, within_s: float) -> str | None:
        """Take the channel there, or answer why not: another may listen at a name that is not the first rank's here."""
        try:
            channel = self._connect(host, port, within_s)
            if not channel.has(_OPEN):
                return "not the first rank's"
        except Exception as error:
            return f"{error}"[:300]
        self._channel = channel
        return None

    def _in_group(self, store: Any) -> Channel:
        return Channel(store, self._prefix, *self._place)

    def _connect(self, host: str, port: int, within_s: float) -> Channel:
        store = _stores.TCPStore(host, port, **_options(within_s), is_master=False)
        store.set_timeout(timedelta(seconds=CONNECT_WITHIN_S))
        return Channel(store, self._prefix, *self._place)


def _options(within_s: float) -> dict[str, Any]:
    return {"timeout": timedelta(seconds=within_s), "wait_for_workers": False}


def current_group() -> Any:
    """The default process group, or None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def placed(config: AgentConfig) -> AgentConfig:
    """With the place in the process group, where there is one: `mp.spawn` tells it by no variable."""
    if current_group() is None:
        return config
    return replace(config, rank=dist.get_rank(), world_size=dist.get_world_size())


def _hosts_of(store: Any) -> list[str]:
    """Names by which other ranks may reach this one, which hosts the group's store too if that is a TCPStore."""
    while isinstance(store, _stores.PrefixStore):
        store = getattr(store, "underlying_store", None)  # absent in old versions
    named = str(store.host) if isinstance(store, _stores.TCPStore) else os.environ.get("MASTER_ADDR")
    hosts = [named, socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((os.environ.get("MASTER_ADDR") or named or "", 9))  # sends nothing
        hosts.append(str(towards.getsockname()[0]))
    return list(dict.fromkeys(host for host in hosts if host))
