"""Trains for 60 or 25 steps in all scenarios or in those given as arguments; prints one JSON line for all ranks.

Each rank trains on different data. Each record contains digests of the weights at several steps, so that a test can
compare ranks.
"""

from __future__ import annotations

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from benchmarks.support.gloo import print_results_of_all_ranks
from tula_agent.scaling import Ags, Gain, Static, TulaOptimizer, taps
from tula_agent.scaling.policies import Served

STEPS = 200
SHORT_STEPS = 25  # of the scenarios that vary what the long ones prove
SERVED_AT = 10
LONG = ("gain", "ags")


class Alone(Gain):
    """A gain policy that leaves the direction of every step unchanged."""

    damping = None


SCENARIOS = {
    "gain": {},
    "gain-alone": {"policy": Alone()},
    "gain-b_small": {"small_batch_size": 4},
    "gain-normalized": {"small_batch_size": 4},
    "gain-normalized-alone": {"small_batch_size": 4, "policy": Alone()},
    "gain-normalized-twice": {"small_batch_size": 16},
    "ags": {},
    "ags-probe": {"small_batch_size": 8},
    "ags-adamw": {},
    "ags-served": {"small_batch_size": 4},
    "gain-adamw": {},
    "static": {"policy": Static(2.0)},
    "gain-accumulate": {},
    "gain-accumulate-held": {},
    "gain-clip": {},
    "gain-served": {},
    "gain-uneven": {"small_batch_size": 4},
    "ags-probe-uneven": {"small_batch_size": 8},
    "gain-powersgd": {},
    "gain-embedding": {},
    "measure": {"policy": "measure"},
    "none": {"policy": "none"},
    "unwrapped": {},
}


def network(*, normalized: bool) -> nn.Module:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(6) if normalized else nn.Identity()
    return nn.Sequential(nn.Conv2d(1, 6, 3), norm, nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(6 * 36, 5))


class Embedded(nn.Module):
    """A network that maps each pixel to a row of an embedding table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.conv, self.head = nn.Embedding(12, 4), nn.Conv2d(4, 6, 3), nn.Linear(6 * 36, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = (images * 3.0 + 6.0).long().clamp(0, 11)
        return self.head(self.conv(self.table(places[:, 0]).movedim(-1, 1)).relu().flatten(1))


def digest(model: nn.Module) -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def run(name: str, rank: int, world_size: int, steps: int) -> dict[str, object]:
    # With batch normalization, steps would keep their directions in the scenarios whose B / b is 2 or 4.
    normalized = name.startswith(("gain-normalized", "gain-adamw")) or not name.startswith("gain")
    module = Embedded() if name == "gain-embedding" else network(normalized=normalized)
    ddp = nn.parallel.DistributedDataParallel(module)
    if name in ("gain-embedding", "gain-normalized-twice") and rank == 1:
        gc.freeze()  # one rank's collector does not show its modules
    if name == "gain-powersgd":
        options = {"use_error_feedback": False, "warm_start": False, "min_compression_rate": 1}
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=0, **options)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    uneven = name.endswith("uneven")  # one rank's last batch of an epoch is shorter, and no global batch size is given
    adaptive, probe = name.endswith("adamw"), name.startswith("ags-probe")
    inner = (
        torch.optim.AdamW(ddp.parameters(), lr=2e-3)
        if adaptive
        else torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    )
    options = dict(SCENARIOS[name])
    if name.startswith("ags"):
        options["policy"] = Ags(
            steps_per_epoch=20,
            model=ddp if probe else None,
            loss=(lambda module, batch: F.cross_entropy(module(batch[0]), batch[1])) if probe else None,
        )
    optimizer = TulaOptimizer(inner, global_batch_size=None if uneven else 16 * world_size, **options)
    if name == "unwrapped":
        optimizer.close()  # every step is the wrapped optimizer's afterwards
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS // 2, 0.1)
    draw = torch.Generator().manual_seed(100 + rank)
    torch.manual_seed(1000 + rank)  # dropout differs by rank, as it does in real jobs
    micro_steps = 2 if name.startswith("gain-accumulate") else 1
    taps.HELD_ON = ("cpu",) if name.endswith("-held") else ("cuda",)  # as on a GPU
    digests, factors, versions = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        size = 5 if uneven and rank == 1 and step % 4 == 3 else 16
        images = torch.randn(size, 1, 8, 8, generator=draw)
        labels = (images[:, 0, 2:4].mean((1, 2)) * 6 + 2.5).long().clamp(0, 4)
        # A rank whose first batch can't be cut hands out whole ones until the ranks have agreed.
        share = 0.5 if name == "gain-b_small" and (rank == 0 or step >= 4) and step < 20 else 1.0
        optimizer.observe_batch((images, labels), share=share)
        for part in range(micro_steps):
            chunk = slice(part * 16 // micro_steps, (part + 1) * 16 // micro_steps)
            last = part == micro_steps - 1
            ddp.require_backward_grad_sync = last
            (F.cross_entropy(ddp(images[chunk]), labels[chunk]) / micro_steps).backward()
        if name == "gain-clip":
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.3)
        if name.endswith("-served") and rank == 0 and step == SERVED_AT:
            optimizer.use_served(Served(version=7, s_max=1.3))
        optimizer.step()
        schedule.step()
        versions.append(optimizer.telemetry()["thresholds_version"])
        if step % (steps // 5) == steps // 5 - 1:
            digests.append(digest(ddp))
            factors.append(optimizer.telemetry().get("scale", 1.0))
    gc.unfreeze()
    noise_scale = optimizer.telemetry().get("gradient_noise_scale")
    return {
        "scenario": name,
        "rank": rank,
        "digests": digests,
        "factors": factors,
        "versions": versions,
        "noise_scale": noise_scale,
    }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lengths = {name: STEPS if name in LONG else SHORT_STEPS for name in sys.argv[1:] or SCENARIOS}
    print_results_of_all_ranks([run(name, rank, world_size, steps) for name, steps in lengths.items()])


if __name__ == "__main__":
    main()
