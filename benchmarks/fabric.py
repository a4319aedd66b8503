"""Measures how well one rank's timeline and a probe of the links predict the step time on eight nodes, with real DDP.

    python -m benchmarks.fabric [--smoke] [--json OUT]        (root, iproute2)

For each combination of three bandwidths and two network sizes, the benchmark creates a project and profiles one node,
where the agent records when each bucket of gradients is ready. It probes the link between two nodes, and asks the
service for a prediction for eight nodes. It then probes all eight nodes, and asks for a second prediction. Finally, a
run on eight nodes measures the true step time. Compute is simulated by waiting (`benchmarks._cluster_job`), and ranks
have priority over other programs, so that eight ranks on the cores of one machine take as long as ranks on separate
nodes.

The keys `from_two.*` and `from_all.*` are the errors of the predictions after the probe of two nodes and after the
probe of all nodes: the `median_error` and the `worst` error (0.1: 10 %). `added.median_error` is the median error of a
simpler prediction, the sum of the compute time and of the time that an all-reduce of all bytes takes according to the
probe of two nodes. `within_interval` is the share of predictions after the probe of two nodes whose 90 % interval
contains the true step time. The smoke run uses one bandwidth, one size and two nodes.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.cluster import processor_clock, served, stolen_share
from benchmarks.support import PYTHON
from benchmarks.support.cluster import Cluster, why_not
from benchmarks.support.report import make_parser, median, print_table, write_json
from tula_client import Client
from tula_service.analysis.hardware import fit_cost
from tula_wire import Configuration, Estimate, ProjectCreate, RunCreate, TokenCreate
from tula_wire.jobs import JobSpec
from tula_wire.samples import FabricProbe

ROOT = Path(__file__).resolve().parents[1]
LOCAL_BATCH = 64
STEPS = 40
RUN_S = 120.0


@dataclass(frozen=True)
class Size:
    """The bandwidths in Mbit/s, the network sizes in bytes, the number of nodes, and a probe's duration in seconds."""

    rates: tuple[float, ...] = (100.0, 200.0, 400.0)
    parameter_bytes: tuple[int, ...] = (2**19, 2**21)
    nodes: int = 8
    probe_s: float = 5.0


SMOKE = Size((400.0,), (2**19,), nodes=2, probe_s=1.0)


@dataclass(frozen=True)
class Case:
    """The predicted and measured step times, in seconds, of one network on links of one bandwidth."""

    from_two: Estimate
    from_all: Estimate
    added_s: float
    truth_s: float


def main() -> int:
    """Run all cases; return 1 if no cluster can be built on this machine."""
    options = make_parser("fabric", __doc__).parse_args()
    if (reason := why_not()) is not None:
        print(f"{reason}: run the benchmark as root on a machine where namespaces can be created", file=sys.stderr)
        return 1
    size = SMOKE if options.smoke else Size()
    cases, rows = [], []
    clock = processor_clock()
    with Cluster(size.nodes, size.rates[0]) as cluster, served(cluster) as (admin, environment):
        for number, (rate, parameter_bytes) in enumerate(product(size.rates, size.parameter_bytes)):
            cluster.set_rate(rate)
            name = f"case{number}"
            admin.create_project(ProjectCreate(name=name))
            token = admin.create_token(TokenCreate(name=name, scope="user", project=name)).secret
            bench = Bench(cluster, Client(admin.url, token), {**environment, "TULA_TOKEN": token}, size)
            cases.append(case := bench.measure(rate, parameter_bytes))
            estimates = case.from_two.value, case.from_all.value, case.added_s
            errors = [f"{1e3 * estimate:.1f} ms ({estimate / case.truth_s - 1:+.1%})" for estimate in estimates]
            rows.append([f"{rate:g} Mbit/s, {parameter_bytes / 2**20:g} MiB", f"{1e3 * case.truth_s:.1f} ms", *errors])
    print(f"{stolen_share(clock):.0%} of the processor time went to other machines on the host")
    header = ["links, gradients", "measured", "after probe of two", "after probe of all", "times added"]
    print_table(f"step time on {size.nodes} nodes", header, rows)
    two, every, added = (
        [abs(predicted / case.truth_s - 1.0) for case, predicted in zip(cases, estimated, strict=True)]
        for estimated in zip(*((c.from_two.value, c.from_all.value, c.added_s) for c in cases), strict=True)
    )
    figures = {
        "from_two.median_error": median(two),
        "from_two.worst": max(two),
        "from_all.median_error": median(every),
        "from_all.worst": max(every),
        "added.median_error": median(added),
        "within_interval": float(np.mean([c.from_two.low <= c.truth_s <= c.from_two.high for c in cases])),
    }
    for key, value in figures.items():
        print(f"{key}: {value:.4g}")
    write_json(options.json, figures)
    return 0


@dataclass(frozen=True)
class Bench:
    """A cluster, the client of one project, and the environment of its runs."""

    cluster: Cluster
    client: Client
    environment: dict[str, str]
    size: Size

    def measure(self, rate: float, parameter_bytes: int) -> Case:
        """Profile one node, probe two nodes, predict, probe all nodes, predict again, and measure all nodes."""
        nodes = self.size.nodes
        spec = {
            "name": "fabric",
            "epochs": 1,
            "objective": "time",
            "model": {"name": "waits"},
            "dataset": {"size": 100_000},
            "cluster": {"max_nodes": nodes, "network_gbps": rate / 1e3},
            "batch": {"min_local_batch_size": LOCAL_BATCH, "max_local_batch_size": LOCAL_BATCH},
            "profiling": {"measuring_steps": STEPS, "precision": 0.0},
        }
        job = self.client.handle(JobSpec.model_validate(spec))
        alone_s = self.step_time_s(job.id, 1, parameter_bytes)
        probe = self.probe(2, rate)
        added_s = alone_s + fit_cost(probe.all_ranks).ring(2, nodes, 4, float(parameter_bytes))[0]
        from_two = self.predicted(job.id)
        self.probe(nodes, rate)
        from_all = self.predicted(job.id)
        return Case(from_two, from_all, added_s, truth_s=self.step_time_s(job.id, nodes, parameter_bytes))

    def predicted(self, job_id: str) -> Estimate:
        """Return the service's prediction of the step time on all nodes."""
        answer = self.client.predictions(job_id, num_nodes=self.size.nodes, local_batch_size=LOCAL_BATCH)
        return answer.candidates[0].step_time_s

    def step_time_s(self, job_id: str, nodes: int, parameter_bytes: int) -> float:
        """Measure a profiling run on `nodes` nodes; return its step time in seconds."""
        configuration = Configuration(num_nodes=nodes, local_batch_size=LOCAL_BATCH)
        created = RunCreate(kind="profile", configuration=configuration, holder="bench")
        run = self.client.create_run(job_id, created)
        environment = {
            **self.environment,
            "TULA_RUN_ID": run.id,
            "TULA_JOB_ID": job_id,
            "TULA_KIND": "profile",
            "TULA_WARMUP_STEPS": "10",
            "TULA_MEASURE_STEPS": str(STEPS),
        }
        words = [f"--nodes={nodes}", f"--batch-size={LOCAL_BATCH}", f"--parameter-bytes={parameter_bytes}"]
        self.run("benchmarks._cluster_job", words, environment)
        measured = self.client.run(run.id).step_time_s
        if measured is None:
            raise RuntimeError(f"the run on {nodes} nodes reported no step time")
        return measured

    def probe(self, nodes: int, rate: float) -> FabricProbe:
        """Probe `nodes` nodes, send the measurements to the service, and return them."""
        words = [f"--nodes={nodes}", f"--seconds={self.size.probe_s:g}"]
        printed = self.run("benchmarks._cluster_probe", words, self.environment)
        (line,) = [line for line in printed.splitlines() if line.startswith("{")]
        measured = FabricProbe.model_validate_json(line)
        probe = measured.model_copy(update={"network_gbps": rate / 1e3})
        self.client.send_probe(probe)
        return probe

    def run(self, module: str, words: list[str], environment: dict[str, str]) -> str:
        """Run a program whose ranks are in namespaces; return its output. Raises CalledProcessError if it fails."""
        places = [f"--{name}={value}" for name, value in self.cluster.for_ranks.items()]
        command = [PYTHON, "-m", module, *words, *places]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=RUN_S, check=True
        )
        return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
