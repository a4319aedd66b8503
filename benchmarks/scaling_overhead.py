"""What gradient scaling costs: percent of the step time of a ResNet-50-sized model under DDP, by source and policy.

    python -m benchmarks.scaling_overhead [--ranks 2] [--batch 4] [--side 128] [--json FILE] [--smoke]

Each part that Tula adds is timed by itself: the leaf hooks (run again on the finished gradients, armed or not as each
configuration left them), and the time of `step` outside the wrapped optimizer's `step`. A difference of two whole step
times would hide one percent in noise. `overhead.fraction` is the default policy's share after its first 512 steps, when
it measures every eighth step and clips spikes in all; `overhead.first_steps_fraction` is its share while every step is
measured; `overhead.none_fraction` is the share of policy `none`, which measures the noise scale at every eighth step.
`--smoke` takes two steps of tiny images: its figures only show that the benchmark works.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tula_agent.scaling import GainRule, TulaOptimizer
from tula_agent.scaling.gain import SPARSE_EVERY

MEASURED_SHARE = 1.0 / SPARSE_EVERY  # of the steps, after the first DENSE_STEPS


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *_conv(inputs, width, 1),
            nn.ReLU(True),
            *_conv(width, width, 3, stride),
            nn.ReLU(True),
            *_conv(width, outputs, 1),
        )
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else nn.Sequential(*_conv(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same spatial size over `stride`."""
        return F.relu(self.body(x) + self.shortcut(x))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs)


def resnet50(num_classes: int = 1000) -> nn.Module:
    """25.6 million parameters in 161 tensors."""
    layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def measure(*, batch: int, side: int, steps: int) -> dict[str, float]:
    """On every rank; seconds are medians over `steps`, of the slowest rank."""
    torch.manual_seed(0)
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    ddp = nn.parallel.DistributedDataParallel(resnet50().to(device))
    images, labels = torch.randn(batch, 3, side, side, device=device), torch.randint(1000, (batch,), device=device)

    def loss(module: nn.Module, data: Any) -> torch.Tensor:
        return F.cross_entropy(module(data[0]), data[1])

    found: dict[str, list[float]] = {}
    configurations: dict[str, dict[str, Any]] = {
        "none": {"policy": "none", "rule": GainRule(measure_every=10_000)},
        "none_measured": {"policy": "none", "rule": GainRule(measure_every=1)},
        "parts": {"policy": "gain", "rule": GainRule(measure_every=1)},
        "between": {"policy": "gain", "rule": GainRule(measure_every=10_000)},
        "ags_gate": {"policy": "ags", "steps_per_epoch": 10_000},
        "ags_refresh": {"policy": "ags", "steps_per_epoch": 1},
        "probe": {
            "policy": "gain",
            "source": "probe",
            "small_batch_size": dist.get_world_size(),
            "rule": GainRule(measure_every=1),
        },
    }
    for name, options in configurations.items():
        inner = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
        optimizer = TulaOptimizer(
            inner, global_batch_size=batch * dist.get_world_size(), model=ddp, loss=loss, **options
        )
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
            found[f"{name}.{part}"] = values[1:] or values
    medians = {name: statistics.median(values) for name, values in found.items()}
    slowest = torch.tensor(list(medians.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(medians, slowest.tolist(), strict=True))


class _Clock:
    """Times the wrapped optimizer's step, and the hooks on finished gradients."""

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


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summarise(seconds: dict[str, float]) -> dict[str, float]:
    """Fractions of the step time without Tula."""
    step = seconds["none.step"] - seconds["none.added"]
    added = {
        name: seconds[f"{name}.added"] + seconds[f"{name}.hooks"]
        for name in ("none", "none_measured", "parts", "between", "ags_gate", "ags_refresh", "probe")
    }
    return {
        "overhead.fraction": (MEASURED_SHARE * added["parts"] + (1 - MEASURED_SHARE) * added["between"]) / step,
        "overhead.none_fraction": (MEASURED_SHARE * added["none_measured"] + (1 - MEASURED_SHARE) * added["none"])
        / step,
        "overhead.first_steps_fraction": added["parts"] / step,
        "overhead.between_fraction": added["between"] / step,
        "overhead.hooks_fraction": seconds["parts.hooks"] / step,
        "overhead.ags_gate_fraction": added["ags_gate"] / step,
        "overhead.ags_refresh_fraction": added["ags_refresh"] / step,
        "overhead.probe_fraction_of_a_probed_step": added["probe"] / step,
        "step_time_s": step,
    }


def main() -> None:
    """Launch the ranks, or be one of them."""
    parser = argparse.ArgumentParser(prog="benchmarks.scaling_overhead", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="examples per rank")
    parser.add_argument("--side", type=int, default=128, help="pixels; 224 is ImageNet's")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="two steps of tiny images: only shows that it works")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.batch, arguments.side, arguments.steps = 2, 64, 2
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "benchmarks.scaling_overhead"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run([*command, *sys.argv[1:]], env=environment, check=False).returncode)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    seconds = measure(batch=arguments.batch, side=arguments.side, steps=arguments.steps)
    if dist.get_rank() == 0:
        values: dict[str, Any] = {
            **summarise(seconds),
            "ranks": dist.get_world_size(),
            "local_batch_size": arguments.batch,
            "side": arguments.side,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        print(json.dumps(values, indent=1), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(values, indent=1) + "\n")
    gc.collect()  # the clocks hold the model in reference cycles; it must be freed before its process group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
