"""Measures the time that each policy of gradient scaling adds to a step of ResNet-50 under DDP, as a share of the step.

    python -m benchmarks.scaling_overhead [--ranks 2] [--batch 4] [--side 128] [--json FILE] [--smoke]

Each part that Tula adds is timed separately: the hooks on the parameters' gradients, and the time that `step` spends
outside the wrapped optimizer's `step`. The hooks are timed by running them again on the finished gradients, in the
state (active or inactive) in which the last step has left them. A difference between two whole step times would be too
noisy to resolve one percent. `overhead.fraction` is the share of the default policy after its first 512 steps, when it
measures every eighth step and clips spikes at every step. `overhead.direction_fraction` is the share that turning the
updates of matrices adds to every step, for the matrices that the default turns at this batch.
`overhead.first_steps_fraction` is the share of the default policy while it measures every step, and
`overhead.measure_fraction` is the share of the policy `measure`, which measures every eighth step. `operations.*` are
the floating-point operations that turning takes, as a share of those that the forward and backward passes take. They
are stated for GPUs, by the number of 224 x 224 images per rank and the number of ranks, and for the passes measured on
this machine (`operations.here`). `--smoke` takes two steps of a narrow ResNet-18 on tiny images; its figures only show
that the benchmark works.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.support.gloo import fork_ranks, leave_group
from benchmarks.support.report import make_parser, write_json
from benchmarks.support.resnet import resnet
from tula_agent.scaling import Ags, Gain, Measure, Policy, TulaOptimizer
from tula_agent.scaling.direction import Directions, affordable, matrix_shape
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.rule import SPARSE_EVERY

MEASURED_SHARE = 1.0 / SPARSE_EVERY  # share of measured steps after the first DENSE_STEPS


def measure(*, depth: int, width: int, batch: int, side: int, steps: int) -> dict[str, float]:
    """Measure each part on every rank; return the slowest rank's median over `steps` steps, in seconds."""
    torch.manual_seed(0)
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    network = resnet(depth, channels=3, num_classes=1000, width=width)
    ddp = nn.parallel.DistributedDataParallel(network.to(device))
    images, labels = torch.randn(batch, 3, side, side, device=device), torch.randint(1000, (batch,), device=device)

    def loss(module: nn.Module, data: Any) -> torch.Tensor:
        return F.cross_entropy(module(data[0]), data[1])

    seconds_by_part: dict[str, list[float]] = {}
    policies: dict[str, Policy] = {
        "measure": _every(10_000, Measure),
        "measure_measured": _every(1, Measure),
        "parts": _every(1, Gain),
        "between": _every(10_000, Gain),
        "ags_gate": Ags(steps_per_epoch=10_000),
        "ags_refresh": Ags(steps_per_epoch=1),
        "probe": Ags(steps_per_epoch=1, model=ddp, loss=loss),
    }
    for name, policy in policies.items():
        inner = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
        ranks = dist.get_world_size()
        small = ranks if name == "probe" else None
        optimizer = TulaOptimizer(inner, policy=policy, global_batch_size=batch * ranks, small_batch_size=small)
        rows: dict[str, list[float]] = {"step": [], "added": [], "hooks": []}
        clock = _Clock(optimizer)
        for _ in range(steps):
            began = _now(device)
            optimizer.zero_grad()
            optimizer.observe_batch((images, labels))
            loss(ddp, (images, labels)).backward()
            before = _now(device)
            optimizer.step()
            done = _now(device)
            rows["step"].append(done - began)
            rows["added"].append(done - before - clock.inner_s)
        rows["hooks"] = clock.replay_hooks(device)
        optimizer.close()
        for part, values in rows.items():
            seconds_by_part[f"{name}.{part}"] = values[1:] or values
    directions = Directions(inner, Ranks())
    noise = dict.fromkeys(directions.plan(None), 1e-3)
    seconds = []
    for _ in range(steps):
        began = _now(device)
        with torch.no_grad():
            directions.turn(1.5, noise, batch * ranks)
        seconds.append(_now(device) - began)
    seconds_by_part["direction.added"] = seconds[1:] or seconds
    seconds_by_part["direction.left_out"] = [float(directions.left_out)]
    medians = {name: statistics.median(values) for name, values in seconds_by_part.items()}
    slowest = torch.tensor(list(medians.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(medians, slowest.tolist(), strict=True))


def _every(steps: int, kind: type[Gain]) -> Gain:
    """Return a policy of type `kind` that measures once in `steps` steps and turns no updates."""
    policy: Gain = type("Every", (kind,), {"measure_every": steps, "damping": None})()
    return policy


class _Clock:
    """Measures the time of the wrapped optimizer's step, and of the hooks on finished gradients."""

    def __init__(self, optimizer: TulaOptimizer) -> None:
        self._optimizer = optimizer
        self.inner_s = 0.0  # of the last step
        inner_step = optimizer.optimizer.step

        def timed(*arguments: Any, **keywords: Any) -> Any:
            device = optimizer.param_groups[0]["params"][0].device
            began = _now(device)
            result = inner_step(*arguments, **keywords)
            self.inner_s = _now(device) - began
            return result

        optimizer.optimizer.step = timed  # type: ignore[method-assign]

    def replay_hooks(self, device: torch.device) -> list[float]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        times = []
        for _ in range(5):
            began = _now(device)
            for parameter in parameters:
                for hook in (parameter._backward_hooks or {}).values():
                    hook(parameter.grad)
            times.append(_now(device) - began)
        return times


def operations(depth: int, *, images: int, ranks: int, side: int = 224, host: bool = False) -> float:
    """Return one rank's operations for turning affordable matrices, as a share of those of both passes."""
    with torch.device("meta"):
        model, image = resnet(depth, channels=3, num_classes=1000), torch.empty(1, 3, side, side)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(image)
    shapes = tuple(shape for p in model.parameters() if (shape := matrix_shape(p)) is not None)
    turned = affordable(shapes, images * ranks, host=host)
    cost = sum(shape.operations(host=host) for shape, use in zip(shapes, turned, strict=True) if use)
    passes = 3.0 * float(counter.get_total_flops()) * images  # a backward pass takes twice as many
    return cost / ranks / passes


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summarise(seconds: dict[str, float]) -> dict[str, float]:
    """Return each part's time as a fraction of the step time without Tula."""
    step = seconds["measure.step"] - seconds["measure.added"]
    added = {
        name: seconds[f"{name}.added"] + seconds[f"{name}.hooks"]
        for name in ("measure", "measure_measured", "parts", "between", "ags_gate", "ags_refresh", "probe")
    }
    return {
        "overhead.fraction": (MEASURED_SHARE * added["parts"] + (1 - MEASURED_SHARE) * added["between"]) / step,
        "overhead.measure_fraction": (
            MEASURED_SHARE * added["measure_measured"] + (1 - MEASURED_SHARE) * added["measure"]
        )
        / step,
        "overhead.direction_fraction": seconds["direction.added"] / step,
        "direction.left_out": seconds["direction.left_out"],
        "overhead.first_steps_fraction": added["parts"] / step,
        "overhead.between_fraction": added["between"] / step,
        "overhead.hooks_fraction": seconds["parts.hooks"] / step,
        "overhead.ags_gate_fraction": added["ags_gate"] / step,
        "overhead.ags_refresh_fraction": added["ags_refresh"] / step,
        "overhead.probe_fraction_of_a_probed_step": added["probe"] / step,
        "step_time_s": step,
    }


def rank_main(options: argparse.Namespace) -> None:
    """Run one rank; the first rank prints and writes the figures."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    seconds = measure(
        depth=options.depth, width=options.width, batch=options.batch, side=options.side, steps=options.steps
    )
    if dist.get_rank() == 0:
        figures: dict[str, float | str] = {
            **summarise(seconds),
            "operations.here": operations(
                options.depth, images=options.batch, ranks=options.ranks, side=options.side, host=True
            ),
            **{
                f"operations.{images}_images_{ranks}_ranks": operations(options.depth, images=images, ranks=ranks)
                for images in (32, 128)
                for ranks in (2, 8)
            },
            "ranks": options.ranks,
            "local_batch_size": options.batch,
            "side": options.side,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        for name, value in figures.items():
            print(f"{name} = {value}")
        write_json(options.json, figures)
    gc.collect()  # reference cycles of the clocks keep the model, which must be freed before the process group
    dist.barrier()
    leave_group()


def main() -> None:
    """Start the ranks and wait until they end."""
    parser = make_parser("scaling_overhead", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="examples per rank")
    parser.add_argument("--side", type=int, default=128, help="width and height of images in pixels (ImageNet: 224)")
    parser.add_argument("--steps", type=int, default=9)
    parser.set_defaults(depth=50, width=64)
    options = parser.parse_args()
    if options.smoke:
        options.depth, options.width, options.batch, options.side, options.steps = 18, 8, 2, 64, 2
    fork_ranks(partial(rank_main, options), options.ranks)


if __name__ == "__main__":
    main()
