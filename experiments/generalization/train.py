"""Trains with one method; all methods use the same epochs and decay, and ranks are simulated one after another."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from experiments.generalization.cases import Case, Mode
from experiments.generalization.data import ImageSet, Split, load
from experiments.generalization.methods import POST_LOCAL_SYNCS_PER_EPOCH, Method, prepare
from experiments.generalization.networks import build
from tula_agent.scaling import TulaOptimizer


@dataclass(frozen=True)
class Result:
    """The accuracies of the last epoch in percent, and figures for the whole run.

    `variability` is the median of equation 5, `scale` is the mean factor, and `scaled_share` is the share of steps in
    which a sensitivity gate allowed scaling.
    """

    case: str
    method: str
    seed: int
    learning_rate: float
    validation: float
    test: float
    diverged: bool
    variability: float
    scale: float
    cpu_s: float
    scaled_share: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


AfterEpoch = Callable[[int, float, Sequence[float]], None]
"""A function of an epoch, the test accuracy after it in percent, and equation 5 for each of its steps."""

FIRST_DECAY = 0.5


def decay(epoch: int, epochs: int) -> float:
    """Return the decay factor: 1 at first, 0.1 after half of the epochs, and 0.01 after three quarters."""
    return 1.0 if epoch < epochs * FIRST_DECAY else 0.1 if epoch < epochs * 0.75 else 0.01


def accuracy(network: nn.Module, split: Split) -> float:
    """Return the percentage of examples in `split` that the network classifies correctly in evaluation mode."""
    network.eval()
    with torch.no_grad():
        right = sum(
            int((network(images).argmax(1) == labels).sum())
            for images, labels in zip(torch.split(split.images, 1024), torch.split(split.labels, 1024), strict=True)
        )
    network.train()
    return 100.0 * right / split.labels.numel()


def train(
    case: Case,
    method: Method,
    mode: Mode,
    *,
    seed: int,
    learning_rate: float,
    after_epoch: AfterEpoch | None = None,
) -> Result:
    """Train on `case` with `method`; return the result. `seed` fixes weights, order and dropout, but not the data."""
    device = torch.device(mode.device)
    images = load(case.dataset, num_train=min(case.num_train or mode.num_train, mode.num_train))
    val, test = (part.first(mode.num_eval).to(device) for part in (images.val, images.test))
    images = replace(images, train=images.train.to(device), val=val, test=test)
    torch.manual_seed(seed)
    network = build(case.network, num_classes=images.num_classes, side=images.side).to(device)
    began = time.process_time()
    run = _Run(case, method, mode, images, network, learning_rate)
    run.train(torch.Generator().manual_seed(seed + 1000), after_epoch)
    diverged = not all(bool(torch.isfinite(p).all()) for p in network.parameters())
    chance = 100.0 / images.num_classes
    return Result(
        case.name,
        method.name,
        seed,
        learning_rate,
        chance if diverged else accuracy(network, images.val),
        chance if diverged else accuracy(network, images.test),
        diverged,
        _median(run.variability),
        sum(run.scales) / len(run.scales) if run.scales else 1.0,
        time.process_time() - began,
        run.scaled_share,
    )


class _Run:
    def __init__(
        self, case: Case, method: Method, mode: Mode, images: ImageSet, network: nn.Module, learning_rate: float
    ) -> None:
        self.case, self.mode, self.images, self.network = case, mode, images, network
        self.steps_per_epoch = len(images.train) // case.batch_size
        self.prepared = prepare(
            method, case, network, learning_rate=learning_rate, steps_per_epoch=self.steps_per_epoch
        )
        # Local steps begin with the first decay of the learning rate (Lin et al. 2020).
        self.local_after = math.ceil(mode.epochs * FIRST_DECAY) if method.kind == "post_local" else mode.epochs
        self._last_norm_sq = 0.0
        self.variability: list[float] = []
        self.scales: list[float] = []

    @property
    def scaled_share(self) -> float:
        """Return the share of scaled steps according to the optimizer's telemetry, or 0 if the optimizer does not
        scale.
        """
        optimizer = self.prepared.optimizer
        return optimizer.telemetry().get("scaled_share", 0.0) if isinstance(optimizer, TulaOptimizer) else 0.0

    def train(self, order: torch.Generator, after_epoch: AfterEpoch | None = None) -> None:
        replicas: list[tuple[nn.Module, torch.optim.Optimizer]] = []
        for epoch in range(self.mode.epochs):
            if epoch == self.local_after:
                replicas = [self._replica() for _ in range(self.case.world_size)]
            first = len(self.variability)
            shuffled = torch.randperm(len(self.images.train), generator=order)
            for step in range(self.steps_per_epoch):
                batch = shuffled[step * self.case.batch_size : (step + 1) * self.case.batch_size]
                rate = next(self.prepared.rates) * decay(epoch, self.mode.epochs)
                if replicas:
                    self._local_step(replicas, batch, rate, step)
                else:
                    self._step(batch, rate)
            if after_epoch is not None:
                after_epoch(epoch, accuracy(self.network, self.images.test), self.variability[first:])
        if replicas:
            _average([network for network, _ in replicas], into=self.network)

    def _step(self, batch: torch.Tensor, rate: float) -> None:
        optimizer = self.prepared.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("rate_share", 1.0)
        optimizer.zero_grad()
        train = self.images.train
        if isinstance(optimizer, TulaOptimizer):
            optimizer.observe_batch((train.images[batch], train.labels[batch]))
        for shard in batch.chunk(self.case.world_size):
            loss = F.cross_entropy(self.network(train.images[shard]), train.labels[shard])
            (loss / self.case.world_size).backward()
        self._record(optimizer)
        if self.prepared.clip is not None:
            self.prepared.clip([p.grad for p in self.network.parameters()], clip=True)
        optimizer.step()

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for p in self.network.parameters() if p.grad is not None]
        norm_sq = float(torch.stack(torch._foreach_norm(gradients)).square().sum())
        if math.isfinite(norm_sq) and self._last_norm_sq > 0.0:
            self.variability.append(abs(norm_sq - self._last_norm_sq) / self._last_norm_sq)
        self._last_norm_sq = norm_sq
        if isinstance(optimizer, TulaOptimizer):
            self.scales.append(optimizer.telemetry().get("scale", 1.0))

    def _replica(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = copy.deepcopy(self.network)
        optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4)
        optimizer.load_state_dict(self.prepared.optimizer.state_dict())
        return network, optimizer

    def _local_step(
        self,
        replicas: Sequence[tuple[nn.Module, torch.optim.Optimizer]],
        batch: torch.Tensor,
        rate: float,
        step: int,
    ) -> None:
        train = self.images.train
        for (network, optimizer), shard in zip(replicas, batch.chunk(len(replicas)), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            F.cross_entropy(network(train.images[shard]), train.labels[shard]).backward()
            optimizer.step()
        if (step + 1) % max(1, self.steps_per_epoch // POST_LOCAL_SYNCS_PER_EPOCH) == 0:
            networks = [network for network, _ in replicas]
            _average(networks, into=self.network)
            for network in networks:
                network.load_state_dict(self.network.state_dict())


def _average(networks: Sequence[nn.Module], *, into: nn.Module) -> None:
    states = [network.state_dict() for network in networks]
    mean = {
        key: torch.stack([state[key] for state in states]).float().mean(0).to(states[0][key].dtype) for key in states[0]
    }
    into.load_state_dict(mean)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan
