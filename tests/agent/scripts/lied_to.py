"""Trains with each policy while the service sends a wrong response before every step; prints all that could change.

All lines except the last are the same without a service. The last line contains the longest pause of this rank's
training thread in seconds, the peak memory of the process in KiB, and the longest exchange with the service in seconds.
"""

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tula_agent
from benchmarks.support.gloo import leave_group
from tula_agent import recorder
from tula_agent.scaling import Ags, Gain, Measure, Off, Static, pull
from tula_agent.scaling.policies import Served
from tula_agent.ship import exporter, joining, transport

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True, help="of each training")
parser.add_argument("--answers", type=int, default=0, help="steps before each of which the agent asks the service once")
parser.add_argument("--policies", default="gain,ags,static,measure,none")
parser.add_argument("--job", help="which each training joins by itself; what counts is what is sent, then")
parser.add_argument("--apply", default="", help="the service's numbers, as the script asks for them itself, in JSON")
PATIENCE_S = 20.0
POLICIES = {policy.name: policy for policy in (Gain(), Measure(), Ags(delta=0.9), Static(2.0, delta=0.9), Off())}


class Asking:
    """Makes the agent send a request before a step, and measures how long the training thread waits meanwhile."""

    answers, exchanges, longest_s = 0, 0, 0.0  # of all trainings

    def __init__(self, run: Any) -> None:
        self._exporter = run.recorder.exporter
        self.worst_s = 0.0

    def once(self, *, joins: bool) -> None:
        before, ends = Asking.answers, time.monotonic() + PATIENCE_S
        self._exporter.wake()
        while Asking.answers == before:
            if joins:  # before the other ranks have named their hosts, the agent wakes and asks nothing
                self._exporter.wake()
            began = time.monotonic()
            assert began < ends, "the agent does not ask"
            time.sleep(0.001)
            self.worst_s = max(self.worst_s, time.monotonic() - began)


def train(policy: str, arguments: argparse.Namespace) -> float:
    """Train once; return the longest duration of a step, or of a short sleep while the agent works."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = tula_agent.TulaOptimizer(inner, policy=POLICIES[policy])
    run = tula_agent.init(job=arguments.job)
    run.watch(model, optimizer)
    asking = Asking(run) if arguments.answers and os.environ.get("RANK", "0") == "0" else None
    generator = torch.Generator().manual_seed(5 + int(os.environ.get("RANK", "0")))
    batches = [(torch.randn(4, 16, generator=generator), torch.arange(4)) for _ in range(arguments.steps)]
    worst_s, count = 0.0, 0
    if arguments.apply:
        optimizer.use_served(Served(**json.loads(arguments.apply)))
    first = 2 if arguments.job else 0  # until then a run that is to be made has no configuration
    for step, (inputs, labels) in enumerate(run.steps(batches)):
        if asking is not None and first <= step < first + arguments.answers:
            asking.once(joins=bool(arguments.job))
        if arguments.job and dist.is_initialized():
            dist.barrier()  # else the next step of other ranks lasts as long as the asking
        before = time.monotonic()
        for part in range(2):  # two micro-steps: one rank has a small batch, too
            loss = nn.functional.cross_entropy(model(inputs[part::2]), labels[part::2]) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        worst_s = max(worst_s, time.monotonic() - before)
        count += 1
    run.finish()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    version = int(optimizer.telemetry()["thresholds_version"])
    sys.stdout.write(f"trained {policy} {count} {finite} {version} {digest}\n")
    return worst_s if asking is None else max(worst_s, asking.worst_s)


def main() -> None:
    arguments = parser.parse_args()
    recorder.REQUEST_TIMEOUT_S, joining.TIMEOUT_S, pull.RETRY_S = 0.3, 0.3, 0.0
    exporter.FIRST_PAUSE_S = exporter.LONGEST_PAUSE_S = 0.001
    use = tula_agent.TulaOptimizer.use_served

    def record(optimizer: Any, wanted: Served) -> None:
        sys.stdout.write(f"taken {wanted}\n")
        use(optimizer, wanted)

    tula_agent.TulaOptimizer.use_served = record
    asks: Any = joining.Joining if arguments.job else pull.ServedNumbers
    name = "ready" if arguments.job else "poll"
    ask = getattr(asks, name)

    def count(*given: Any) -> Any:
        before, result = Asking.exchanges, None
        try:
            result = ask(*given)
            return result
        finally:
            Asking.answers += result is not False or Asking.exchanges > before

    setattr(asks, name, count)
    exchange: Any = transport.Transport.exchange

    def timed(*given: Any, **options: Any) -> Any:
        began = time.monotonic()
        reply = exchange(*given, **options)
        Asking.exchanges += 1
        Asking.longest_s = max(Asking.longest_s, time.monotonic() - began)
        return reply

    transport.Transport.exchange = timed
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    worst_s = max(train(policy, arguments) for policy in arguments.policies.split(","))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(f"cost {worst_s:.4f} {memory} {Asking.longest_s:.4f}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main()
