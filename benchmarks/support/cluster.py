"""Builds a cluster on one machine, with network namespaces as nodes and a bridge with links of a given bandwidth.

The cluster needs root, iproute2 and a kernel with network namespaces and the tbf queue; `why_not` states what is
missing. Links with a delay also need the netem queue, which not every kernel has; see `why_no_delay`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from benchmarks.support.fork_server import set_namespace

_CLONE_NEWNET = 0x40000000
_BURST_KB = 32
_SEGMENTS = ("gso_max_size", "16384")
"""The maximum size of segments. tbf cuts segments above its burst into packets, and this takes so much processor time
that eight nodes reduce 512 KiB at 400 Mbit/s in 33 ms instead of 19.5 ms.
"""
_IN_ORDER = "echo {cores:x} > /sys/class/net/{interface}/queues/rx-0/rps_cpus"
"""Assigns the packets of a flow to one core. A veth otherwise delivers packets on the sender's core, so they arrive out
of order after the sender has moved to another core, and TCP sends them again.
"""
_STEADY = ("sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
"""Selects Reno. BBR, the default on some machines, limits a flow to four packets for 200 ms every ten seconds, so one
in fourteen steps of eight nodes takes 140 ms longer.
"""


def why_not() -> str | None:
    """Return one sentence that explains why this machine cannot build a cluster, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster of network namespaces needs root on Linux"
    try:
        _try_queue("tbf", *_rate(100))
    except FileNotFoundError as error:
        return f"a cluster of network namespaces needs iproute2 ({error.filename} is missing)"
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespace with a rate limit ({error.stderr.strip()})"
    return None


def why_no_delay() -> str | None:
    """Return one sentence that explains why links on this machine cannot have a delay, or None if they can."""
    if (reason := why_not()) is not None:
        return reason
    try:
        _try_queue("netem", "delay", "1ms")
    except subprocess.CalledProcessError as error:
        return f"this kernel has no netem queue ({error.stderr.strip().splitlines()[0]})"
    return None


def _try_queue(*words: str) -> None:
    name = f"tula-probe-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", *words)
    finally:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


class Cluster:
    """A cluster of `num_nodes` namespaces, each with one link of `mbit_per_s` in either direction.

    `delay_ms` is added once in either direction of every link (netem), so a packet from node to node is delayed twice.
    Node i has the address `address(i)`, and this machine has the address `host`. Leaving the `with` block removes the
    cluster completely.
    """

    def __init__(self, num_nodes: int, mbit_per_s: float, *, delay_ms: float = 0.0) -> None:
        self.num_nodes = num_nodes
        self.mbit_per_s = mbit_per_s
        self.delay_ms = delay_ms
        self._tag = f"{os.getpid() % 100_000}"
        self._net = f"10.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}"
        self._bridge = f"tb{self._tag}"

    @property
    def host(self) -> str:
        """Return the address at which the nodes reach this machine."""
        return f"{self._net}.1"

    @property
    def interface(self) -> str:
        """Return the name of the network interface for GLOO_SOCKET_IFNAME, which is the same in every namespace."""
        return "node0"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"{self._net}.{10 + node}"

    def namespace(self, node: int) -> str:
        """Return the name of a node's namespace."""
        return f"tula-{self._tag}-{node}"

    @property
    def for_ranks(self) -> dict[str, str]:
        """Return the arguments of `fork_ranks` that let ranks find their nodes and each other."""
        return {"namespaces": f"tula-{self._tag}-", "master": self.address(0), "interface": self.interface}

    def command(self, node: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on a node."""
        return ["ip", "netns", "exec", self.namespace(node), *words]

    def set_rate(self, mbit_per_s: float) -> None:
        """Change the bandwidth of every link, even while traffic flows."""
        self.mbit_per_s = mbit_per_s
        for node in range(self.num_nodes):
            self._queue(node, "change", "root", "handle", "1:", "tbf", *_rate(mbit_per_s))

    def __enter__(self) -> Cluster:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _outer(self, node: int) -> str:
        return f"tv{self._tag}n{node}"

    def _build(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in range(self.num_nodes):
            space, outer = self.namespace(node), self._outer(node)
            _ip("netns", "add", space)
            _ip("link", "add", outer, "type", "veth", "peer", "name", self.interface, "netns", space)
            _ip("link", "set", outer, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", self.interface)
            _ip("-n", space, "link", "set", self.interface, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("link", "set", outer, *_SEGMENTS)
            _ip("-n", space, "link", "set", self.interface, *_SEGMENTS)
            _run(*self.command(node, _STEADY))
            cores = (1 << (os.cpu_count() or 1)) - 1
            _run("sh", "-c", _IN_ORDER.format(cores=cores, interface=outer))
            _run(*self.command(node, ["sh", "-c", _IN_ORDER.format(cores=cores, interface=self.interface)]))
            self._queue(node, "add", "root", "handle", "1:", "tbf", *_rate(self.mbit_per_s))
            if self.delay_ms:
                self._queue(node, "add", "parent", "1:1", "handle", "10:", "netem", "delay", f"{self.delay_ms:g}ms")

    def _queue(self, node: int, change: str, *words: str) -> None:
        """Set the same queue at both ends of a node's link."""
        _run("tc", "qdisc", change, "dev", self._outer(node), *words)
        _run(*self.command(node, ["tc", "qdisc", change, "dev", self.interface, *words]))

    def _remove(self) -> None:
        for node in range(self.num_nodes):
            subprocess.run(["ip", "netns", "delete", self.namespace(node)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "delete", self._outer(node)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)


def enter(namespace: str) -> None:
    """Move this process into a namespace. Raises OSError if it cannot enter the namespace."""
    with open(f"/var/run/netns/{namespace}") as file:  # noqa: PTH123
        set_namespace(file.fileno(), _CLONE_NEWNET, f"the network namespace {namespace}")


def _rate(mbit_per_s: float) -> list[str]:
    return ["rate", f"{round(mbit_per_s * 1000)}kbit", "burst", f"{_BURST_KB}kb", "latency", "400ms"]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
