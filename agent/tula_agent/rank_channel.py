"""Lets ranks exchange messages. The agent has three mechanisms by which ranks agree; this module contains the first.

1. A key-value store (`Channel` in this module, which `StopAgreement` in profiling.py and `OomWatch` in oom_watch.py
use). Threads of any rank can exchange messages through the store at any time, without a collective. So a rank that
hangs in a collective or has no agent does not delay the messages of other ranks. The store carries telemetry and the
decision to stop a profiling run, but never a weight.

2. A reduction over ranks (`tula_agent.scaling.ranks`). Inside the optimizer's step, every rank is at the same point,
and all ranks must compute the same bits. Numbers that change a weight are therefore summed by the collective that
training uses anyway.

3. A gather of objects (`_Ranks` in checkpoint.py). The script calls `run.checkpoint` on all ranks; if one fails, all
must fail with the same message. Checkpoints are rare, so a slow, general collective is good enough.

The store is torchrun's store or, without torchrun, a store that the first rank hosts for this purpose. The process
group's own store is unsuitable, because it would have to be kept open, and a new group at the same address would find
the old group's keys in it.
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

_stores: Any = dist  # untyped, since torch builds without distributed have no stores

RING = 64
"""Number of messages that the store keeps from each sender; a new message overwrites the oldest."""
CONNECT_WITHIN_S = 5.0
_ADDRESS, _OPEN = "address", "open"


class Channel:
    """Exchanges messages between ranks, from any thread.

    `prefix` keeps the keys of different process groups and restarts apart. `set` and `get` each take a round trip of
    about 50 us. If the store is gone, they raise the store's errors (RuntimeError and subclasses), so callers must use
    a guard.
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
        """Return True if all of `keys` have been published, without waiting for them."""
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
        """Store `message` for the first rank; the store keeps each rank's last RING messages."""
        self.set(f"box/{self.rank}/{self._sent % RING}", [self._sent, message])
        self._sent += 1

    def collect(self, rank: int) -> list[Any]:
        """Return the messages that `rank` has posted since the last call, oldest first, without waiting."""
        messages = []
        while self.has(f"box/{rank}/{self._next[rank] % RING}"):
            number, message = self.get(f"box/{rank}/{self._next[rank] % RING}")
            if number < self._next[rank]:
                break  # an old message that has not been overwritten
            messages.append(message)
            self._next[rank] = number + 1
        return messages


class RankRendezvous:
    """Provides each rank of a process group with one `Channel`, which the rank's threads share.

    Every rank creates a rendezvous when it begins to train in the group. The first rank chooses a store for all ranks:
    torchrun's store, which outlives every rank, or else a new store on a free port. The first rank publishes the
    store's address in `group_store`, the group's own store, and the other ranks connect to that address. A rendezvous
    keeps only a weak reference to `group_store`.
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
        """Connect to the first address that works; try each address only once, since a second attempt would take as
        long.
        """
        failed = []
        for host, port in addresses:
            try:
                channel = self.connect(host, port, CONNECT_WITHIN_S / len(addresses))
                if channel.has(_OPEN):
                    self._channel = channel
                    return
                error = "this is not the first rank's store"  # the name may belong to another machine in this network
            except Exception as caught:
                error = f"{caught}"[:300]
            failed.append(f"{host}:{port} ({error})")
        self._unreachable = True
        raise RuntimeError("the first rank's store cannot be reached: " + ", ".join(failed))

    def _over(self, store: Any) -> Channel:
        return Channel(store, self._prefix, self._rank, self._world_size)

    def connect(self, host: str, port: int, within_s: float) -> Channel:
        """Return a channel over the store at `host`:`port`.

        Raises RuntimeError if the store does not respond within `within_s` seconds.
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
    """Return `config` with the rank and size of the process group, if any; `mp.spawn` sets no environment variables."""
    if current_group() is None:
        return config
    return replace(config, rank=dist.get_rank(), world_size=dist.get_world_size())


def _list_hosts(store: Any) -> list[str]:
    """Return the host names at which other ranks may reach this rank, which also hosts the group's TCPStore."""
    while isinstance(store, _stores.PrefixStore):
        store = getattr(store, "underlying_store", None)  # absent in old versions
    named = str(store.host) if isinstance(store, _stores.TCPStore) else os.environ.get("MASTER_ADDR")
    hosts = [named, socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or named or "", 9))  # sends nothing
        hosts.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(host for host in hosts if host))
