"""Lets ranks reach agreement. The agent has three mechanisms for distinct purposes; this module contains the first.

1. A key-value store (`Channel`, here; `StopAgreement` in profiling.py and `OomWatch` in oom_watch.py use it). It passes
messages between threads of any rank at any time, without a collective: a rank that hangs in a collective, or has no
agent, neither delays it nor is delayed by it. It carries telemetry and the decision to stop a profiling run, but never
a weight. 2. A reduction over ranks (`tula_agent.scaling.ranks`). Inside the optimizer's step every rank is at the same
place, and all must compute the same bits. Numbers that change a weight are therefore summed by the collective that
training uses anyway. 3. A gather of objects (`_Ranks` in checkpoint.py). The script calls `run.checkpoint` on all
ranks; if one fails, all must fail with the same message. Checkpoints are rare, so a slow, general collective is good
enough.

The store is torchrun's or, without torchrun, a store that the first rank hosts for this purpose. The process group's
own store would have to be kept open, and a new group at the same address would find the keys of the old one.
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

_stores: Any = dist  # untyped: torch builds without distributed lack its stores

RING = 64
"""Number of messages that the store keeps of each sender; a new message overwrites the oldest."""
CONNECT_WITHIN_S = 5.0
_ADDRESS, _OPEN = "address", "open"


class Channel:
    """Messages between ranks, from any thread. `prefix` makes keys private to one process group of one start of a run.

    `set` and `get` are round trips of about 50 us. When the store is gone they raise its errors (RuntimeError and
    subclasses); callers run under a guard.
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
        """Return True if all of `keys` have been published; never waits."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def wait(self, key: str, within_s: float) -> Any:
        """Return the value of `key`, or None if it is not published within `within_s` seconds."""
        ends = time.monotonic() + within_s
        pause = 0.0002
        while not self.has(key):
            if time.monotonic() > ends:
                return None
            time.sleep(pause)
            pause = min(0.01, pause * 1.5)
        return self.get(key)

    def get(self, key: str) -> Any:
        """Return the value of a published `key`."""
        return json.loads(self._store.get(self._prefix + key))

    def post(self, message: Any) -> None:
        """Leave `message` for the first rank; the store keeps each rank's last RING messages."""
        self.set(f"box/{self.rank}/{self._sent % RING}", [self._sent, message])
        self._sent += 1

    def collect(self, rank: int) -> list[Any]:
        """Return the messages of `rank` since the last call, oldest first; never waits."""
        messages = []
        while self.has(f"box/{rank}/{self._next[rank] % RING}"):
            number, message = self.get(f"box/{rank}/{self._next[rank] % RING}")
            if number < self._next[rank]:
                break  # a message of the previous round
            messages.append(message)
            self._next[rank] = number + 1
        return messages


class RankRendezvous:
    """Gives each rank of a process group one `Channel`, shared by its threads.

    Every rank creates one when it begins to train in that group. The first rank chooses a store for all ranks:
    torchrun's, which outlives every rank, or else a new store on a free port. It publishes the address in
    `group_store`, the group's own store, to which it keeps only a weak reference; the other ranks connect to that
    address.
    """

    def __init__(self, group_store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._prefix = prefix
        self._rank, self._world_size = rank, world_size
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._unreachable = False
        self._group_store = None if group_store is None else weakref.ref(group_store)
        if group_store is not None and rank == 0:
            addresses: list[tuple[str, int]] = []
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                with suppress(RuntimeError, ValueError, KeyError):
                    addresses = [(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))]
                    self._channel = self.connect(*addresses[0], CONNECT_WITHIN_S)
            if self._channel is None:
                store = _stores.TCPStore("localhost", 0, **_options(CONNECT_WITHIN_S), is_master=True)
                self._channel = self._over(store)
                addresses = [(host, store.port) for host in _list_hosts(group_store)]
            self._channel.set(_OPEN, True)
            self._over(group_store).set(_ADDRESS, addresses)

    def channel(self, within_s: float = 0.0) -> Channel | None:
        """Return the channel, or None if the first rank has not published its address within `within_s` seconds."""
        ends = time.monotonic() + within_s
        if self._channel is None and self._lock.acquire(timeout=max(0.0, within_s)):
            try:
                store = None if self._group_store is None else self._group_store()
                if self._channel is None and not self._unreachable and store is not None:
                    addresses = self._over(store).wait(_ADDRESS, ends - time.monotonic())
                    if addresses is not None:
                        self._reach(addresses)
            finally:
                self._lock.release()
        return self._channel

    def _reach(self, addresses: list[tuple[str, int]]) -> None:
        """Try each address only once, since a second attempt would take as long again."""
        failed = []
        for host, port in addresses:
            try:
                channel = self.connect(host, port, CONNECT_WITHIN_S / len(addresses))
                if channel.has(_OPEN):
                    self._channel = channel
                    return
                error = "not the first rank's store"  # the name may belong to another machine in this network
            except Exception as caught:
                error = f"{caught}"[:300]
            failed.append(f"{host}:{port} ({error})")
        self._unreachable = True
        raise RuntimeError("the first rank's store cannot be reached: " + ", ".join(failed))

    def _over(self, store: Any) -> Channel:
        return Channel(store, self._prefix, self._rank, self._world_size)

    def connect(self, host: str, port: int, within_s: float) -> Channel:
        """Return a channel over the store at `host`:`port`.

        Raises RuntimeError if it does not answer within `within_s` seconds.
        """
        store = _stores.TCPStore(host, port, **_options(within_s), is_master=False)
        store.set_timeout(timedelta(seconds=CONNECT_WITHIN_S))
        return self._over(store)


def _options(within_s: float) -> dict[str, Any]:
    return {"timeout": timedelta(seconds=within_s), "wait_for_workers": False}


def current_group() -> Any:
    """Return the default process group, or None."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def with_group_place(config: AgentConfig) -> AgentConfig:
    """Return `config` with the process group's rank and world size, if any; `mp.spawn` sets no variables for them."""
    if current_group() is None:
        return config
    return replace(config, rank=dist.get_rank(), world_size=dist.get_world_size())


def _list_hosts(store: Any) -> list[str]:
    """Return the names by which other ranks may reach this rank, which also hosts the group's TCPStore."""
    while isinstance(store, _stores.PrefixStore):
        store = getattr(store, "underlying_store", None)  # absent in old versions
    named = str(store.host) if isinstance(store, _stores.TCPStore) else os.environ.get("MASTER_ADDR")
    hosts = [named, socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or named or "", 9))  # sends nothing
        hosts.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(host for host in hosts if host))
