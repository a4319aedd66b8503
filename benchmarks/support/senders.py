"""Simulates agents that repeat requests until they are acknowledged, and checks that acknowledged rows are stored."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import numpy as np

from benchmarks.support.prepared import Prepared
from tula_wire import routes

SENDERS = 4
STEPS = 20
PATIENCE_S = 0.1
"""Seconds that a sender waits before a retry, and between batches while no test waits for its progress."""


@dataclass
class Sender:
    """A simulated agent that sends samples and telemetry, and repeats each request until it is acknowledged."""

    prepared: Prepared
    rank: int
    acknowledged: int = 0
    resent: int = 0
    hurried: bool = True
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, url: Callable[[], str]) -> None:
        """Send until `stopped` is set; go on to the next batch only after a 2xx response to both requests."""
        with self.client() as client:
            while not self.stopped.is_set():
                try:
                    if self.samples(client, url()) and self.chunk(client, url()):
                        self.acknowledged += 1
                        self.stopped.wait(0.0 if self.hurried else PATIENCE_S)
                        continue
                except httpx.HTTPError:
                    pass
                self.resent += 1
                self.stopped.wait(PATIENCE_S)

    def client(self) -> httpx.Client:
        """Return a client that sends the job's token."""
        return httpx.Client(headers={"Authorization": f"Bearer {self.prepared.token}"}, timeout=10)

    def samples(self, client: httpx.Client, url: str) -> bool:
        """Send the next batch of samples; return True if it was acknowledged."""
        numbers = list(range(self.acknowledged * STEPS, (self.acknowledged + 1) * STEPS))
        body = {"rank": self.rank, "boot_id": "b", "sequence": numbers, "step": numbers, "step_time_s": [0.1] * STEPS}
        return client.post(url + routes.RUN_SAMPLES.format(run_id=self.prepared.run_id), json=body).is_success

    def chunk(self, client: httpx.Client, url: str) -> bool:
        """Send the next chunk of telemetry; return True if it was acknowledged."""
        column = np.random.default_rng(self.acknowledged).normal(size=STEPS)
        body = {
            "rank": self.rank,
            "boot_id": "b",
            "sequence": self.acknowledged,
            "steps": list(range(STEPS)),
            "columns": {"loss": column.tolist()},
        }
        path = routes.RUN_TELEMETRY.format(run_id=self.prepared.run_id)
        return client.post(url + path, json=body).is_success


@contextmanager
def sending(prepared: Prepared, url: Callable[[], str], number: int = SENDERS) -> Iterator[list[Sender]]:
    """Run `number` senders until the `with` block ends."""
    senders = [Sender(prepared, rank) for rank in range(number)]
    threads = [threading.Thread(target=sender.run, args=(url,)) for sender in senders]
    for thread in threads:
        thread.start()
    try:
        yield senders
    finally:
        for sender in senders:
            sender.stopped.set()
        for thread in threads:
            thread.join()


@contextmanager
def unhurried(senders: list[Sender]) -> Iterator[None]:
    """Slow the senders down within the `with` block, so that other processes can start on the machine."""
    for sender in senders:
        sender.hurried = False
    try:
        yield
    finally:
        for sender in senders:
            sender.hurried = True


def progressed(senders: list[Sender], by: int = 2) -> None:
    """Wait until the service has acknowledged `by` more batches of every sender."""
    goals = [sender.acknowledged + by for sender in senders]
    ends = time.monotonic() + 40
    while any(sender.acknowledged < goal for sender, goal in zip(senders, goals, strict=True)):
        assert time.monotonic() < ends, [(sender.acknowledged, sender.resent) for sender in senders]
        time.sleep(0.01)


def nothing_lost_nothing_twice(prepared: Prepared, senders: list[Sender]) -> None:
    """Assert that every acknowledged row is stored exactly once; other rows may or may not be stored."""
    samples, chunks = map(Counter, prepared.stored())
    acknowledged = Counter((sender.rank, number) for sender in senders for number in range(sender.acknowledged * STEPS))
    wanted_chunks = Counter((sender.rank, number) for sender in senders for number in range(sender.acknowledged))
    lost = len(acknowledged.keys() - samples.keys()) + len(wanted_chunks.keys() - chunks.keys())
    doubled = samples.total() - len(samples) + chunks.total() - len(chunks)
    assert (lost, doubled) == (0, 0), f"of {acknowledged.total() + wanted_chunks.total()} acknowledged rows"
