"""TulaOptimizer: wraps any optimizer and scales the steps of a large batch, by the same factor on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tula_agent.scaling.ags import AgsPolicy, GatedFactors
from tula_agent.scaling.gain import PLAIN, GainPolicy, GainRule
from tula_agent.scaling.meter import LossFunction, Meter
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.thresholds import PolicyName, ScalingThresholds, SyncedThresholds
from tula_agent.torch_private import is_sharded
from tula_wire.bounds import Granularity

_STATE_KEY = "tula"
_STATE_FORMAT = 2
"""Of what is stored under that key; it grows when a stored number gets another name or meaning. 1 was not stored."""
_FACTORS_DEPEND_ON = ("granularity", "small_batch_size", "s_min", "s_max")
_CHUNKS = 16


def _of_inner(name: str) -> Any:
    """An attribute of the wrapped optimizer, to read and to replace."""
    return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))


class TulaOptimizer(torch.optim.Optimizer):
    """An optimizer around `optimizer` that scales its steps; it delegates everything else.

    It wraps `step` rather than hooking into it: it restores the learning rate even when the step raises, a GradScaler
    always unscales first (also for fused optimizers), and its state is part of `state_dict`.

    policy: `gain` (the default) multiplies the learning rate by the noise gain for SGD, else by its root;
    `ags` is Algorithm 1 and `static` equation 8, both on the gradient of plain SGD and on the update of any other
    optimizer; `measure` changes nothing and measures the gradient noise scale at the first 128 steps and then every
    eighth; `none` does nothing.
    granularity: of `ags`, one factor per `element` (the default, as printed) or per `tensor`.
    global_batch_size, small_batch_size: examples per step over all ranks, and b_small; without them b_small is the
    batch of one rank or micro-step.
    delta, static_scale, s_min, s_max: see `ScalingThresholds`. The service never changes what is given here.
    steps_per_epoch: after how many steps `ags` finds its factors; without it, after the first step that follows a
    `next_epoch`, or every 200.
    model, loss: of `ags`, to sample b_small by a probe (`loss(module, batch)` is the mean loss); `observe_batch` must
    then get each batch. Without them, ranks and micro-steps serve as small batches.
    `scripted_thresholds` are those by the arguments, `scripted_names` the ones that were passed.
    rule: constants of `gain`. `GainRule(spike_limit=None)` turns clipping off; experiments vary the others.

    Every rank must construct it with the same arguments and step as often (a few numbers are reduced over
    `process_group`). Raises TypeError for something that is not an optimizer, and ValueError for a senseless threshold,
    for sharded parameters (FSDP, tensor parallelism), of which no rank's own gradient is left to compare, or for a
    group without `lr`. The first `step` raises ValueError for a `small_batch_size` without any global batch size.
    """

    _step_supports_amp_scaling = False  # GradScaler must unscale first, whatever the wrapped optimizer supports

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        policy: PolicyName | None = None,
        granularity: Granularity | None = None,
        small_batch_size: int | None = None,
        delta: float | None = None,
        static_scale: float | None = None,
        s_min: float | None = None,
        s_max: float | None = None,
        global_batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        model: nn.Module | None = None,
        loss: LossFunction | None = None,
        rule: GainRule | None = None,
        process_group: Any = None,
    ) -> None:
        _refuse_unusable(optimizer)
        self._inner = optimizer
        # How the base class sets up an instance that it did not initialise; it registers no parameter twice.
        super().__setstate__({})
        given = {
            "policy": policy,
            "granularity": granularity,
            "delta": delta,
            "small_batch_size": small_batch_size,
            "static_scale": static_scale,
            "s_min": s_min,
            "s_max": s_max,
        }
        self._scripted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.scripted_names = frozenset(self._scripted)
        self.scripted_thresholds = self._thresholds = ScalingThresholds(**self._scripted)
        ranks = Ranks(process_group)
        self._meter = Meter(optimizer, ranks, global_batch_size=global_batch_size, model=model, loss=loss)
        self._synced = SyncedThresholds(ranks)
        self._gain = GainPolicy(self._meter, rule or GainRule())
        self._ags = AgsPolicy(self._meter, steps_per_epoch)
        self._steps, self._progress = 0, 0.0
        self._closed = self._size_known = False
        self._prepare()

    # Schedulers and frameworks read and replace these three: they are the wrapped optimizer's.
    param_groups: list[dict[str, Any]] = _of_inner("param_groups")
    state: Any = _of_inner("state")
    defaults: dict[str, Any] = _of_inner("defaults")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def thresholds(self) -> ScalingThresholds:
        """The thresholds in force on all ranks."""
        return self._thresholds

    @property
    def progress(self) -> float:
        """Steps so far, each counted by its `gain` factor (AdaScale's progress), else as 1; equal on all ranks.

        Where a step is as good as r steps at the small batch, a schedule in steps of the small batch continues at this
        position: `scheduler = LambdaLR(optimizer, lambda _: decay(optimizer.progress))`.
        """
        return self._progress

    def apply_thresholds(self, thresholds: ScalingThresholds) -> None:
        """Ask for new thresholds: the first rank's take effect on all ranks at one step, at most 17 steps from now."""
        self._synced.propose(thresholds)

    def observe_batch(self, batch: Any, *, size: float | None = None, share: float | None = None) -> None:
        """Take the batch of this step on this rank (nested tensors, examples first), or of each of its micro-steps.

        size: what it counts for, where that is not its number of examples: tokens, for sequences of unequal length;
        batch sizes and the noise scale are then in tokens. share: which part of each batch the script is handed from
        now on; the agent says so while a launch measures smaller batches, and B is this part of `global_batch_size`.
        The last batch is kept by reference until `step`.
        """
        self._meter.observe(batch, size)
        if share is not None:
            self._meter.share = share

    def next_epoch(self) -> None:
        """An epoch begins on every rank: `ags` finds factors after its first step, unless it has `steps_per_epoch`."""
        self._ags.next_epoch(self._steps, self._thresholds)
        self._prepare()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One scaled step; `closure` is evaluated once, before anything is measured."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        meter = self._meter
        if not self._size_known:
            self._refuse_unknown_batch()
        agreed = self._synced.poll(self._steps, self._thresholds, meter.device)
        if agreed is not None:
            self._switch(agreed)
        if not self._closed:
            meter.tap.watch(meter.parameters())
        policy = self._policy
        factors = 1.0 if policy is None else policy.factors(self._steps, self._thresholds)
        self._apply(factors)
        self._steps += 1
        self._progress += factors if isinstance(factors, float) else 1.0
        meter.forget_batch()
        self._prepare()
        return loss

    def _refuse_unknown_batch(self) -> None:
        """b_small means nothing without B: factors would have a ceiling that is several times too high."""
        needed = "small_batch_size" in self._scripted and self._thresholds.policy in ("gain", "ags")
        if needed and self._meter.batch_size is None and not self._meter.observed:
            raise ValueError(
                "small_batch_size is given without the global batch size: "
                "give TulaOptimizer global_batch_size=, or call observe_batch with each batch"
            )
        self._size_known = True

    def _apply(self, factors: float | GatedFactors) -> None:
        """Take the wrapped optimizer's step, scaled: the one place where factors meet weights."""
        if isinstance(factors, float):
            with scaled_learning_rate(self._inner.param_groups, factors):
                self._inner.step()
            return
        scaled = {
            id(parameter): factor
            for parameter, factor in zip(self._meter.parameters(), factors.by_parameter, strict=True)
            if factor is not None and parameter.grad is not None and not parameter.grad.is_sparse
        }
        if not isinstance(self._inner, PLAIN):
            self._step_with_scaled_updates(scaled, factors.gate)
            return
        for parameter in self._meter.parameters():
            if parameter.grad is not None and id(parameter) in scaled:
                factor = _gated(scaled[id(parameter)], factors.gate)
                parameter.grad.mul_(factor.to(parameter.device, parameter.grad.dtype))
        self._inner.step()

    def _step_with_scaled_updates(self, factors: dict[int, torch.Tensor], gate: torch.Tensor) -> None:
        """w <- w_before + s (w - w_before), which is exactly w where the gate is 0 or s is 1.

        In chunks, each with the gradients of the others hidden, so that no second copy of the model is held. An
        optimizer that is not torch's may look at all gradients at once: it takes one step, and the copy is whole.
        """
        whole = not factors or not type(self._inner).__module__.startswith("torch.optim.")
        parameters = [p for p in self._meter.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        try:
            for chunk in [parameters] if whole else _chunks(parameters):
                inside = set(map(id, chunk))
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient if id(parameter) in inside else None
                before = [(p, p.detach().clone(), factors[id(p)]) for p in chunk if id(p) in factors]
                self._inner.step()
                for parameter, old, factor in before:
                    scale = _gated(factor, gate).to(parameter.device, parameter.dtype)
                    torch.lerp(old, parameter, scale.expand_as(parameter), out=parameter)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; also drops what a skipped step left in the taps."""
        self._inner.zero_grad(set_to_none=set_to_none)
        self._meter.tap.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters are watched from the next backward on."""
        self._inner.add_param_group(param_group)
        self._prepare()

    def telemetry(self) -> dict[str, float]:
        """Values of the last steps by telemetry column, as far as they are on the host; never waits for the device.

        `scripted_*`: numbers that the script passed explicitly.
        """
        policy = self._policy
        thresholds = self.thresholds
        base = {"thresholds_version": float(thresholds.version), "step": float(self._steps), "delta": thresholds.delta}
        if thresholds.small_batch_size is not None:
            base["small_batch_size"] = float(thresholds.small_batch_size)
        numbers = {k: v for k, v in self._scripted.items() if not isinstance(v, str)}
        base |= {f"scripted_{name}": float(value) for name, value in numbers.items()}
        known = {} if policy is None else policy.telemetry(self._thresholds)
        return {**{k: v for k, v in known.items() if not math.isnan(v)}, **base}

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under `tula`, all that decides the next factors; equal on all ranks."""
        own = {
            "format": _STATE_FORMAT,
            "steps": self._steps,
            "progress": self._progress,
            "thresholds": self._thresholds.to_vector(),
            "agreement": self._synced.state(),
            "gain": self._gain.state(),
            "gated": self._ags.state(),
        }
        return {**self._inner.state_dict(), _STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit from `state_dict`; without the key `tula` scaling starts from nothing.

        Raises ValueError where another version of Tula wrote that key, before anything is changed.
        """
        own = state_dict.get(_STATE_KEY)
        if own is not None and (written := own.get("format", 1)) != _STATE_FORMAT:
            version = "an earlier" if written < _STATE_FORMAT else "a later"
            raise ValueError(
                f"the state of gradient scaling was written by {version} version of Tula; finish that training with "
                f"it, or leave out the optimizer's key {_STATE_KEY!r}, so that scaling starts afresh"
            )
        rest = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
        self._inner.load_state_dict(rest)
        if own is not None:
            self._steps = int(own["steps"])
            self._progress = float(own["progress"])
            self._thresholds = ScalingThresholds.from_vector(own["thresholds"])
            self._synced.load(own["agreement"])
            self._gain.load(own["gain"])
            self._ags.load(own["gated"])
        self._prepare()

    def close(self) -> None:
        """Remove every hook from the parameters; later steps are the wrapped optimizer's."""
        self._closed = True
        self._meter.tap.close()

    def __getattr__(self, name: str) -> Any:
        # train() and eval() of schedule-free optimizers, for example; never own fields, which may not exist yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a TulaOptimizer holds hooks and process groups and can't be pickled: save its state_dict()")

    def __repr__(self) -> str:
        return f"TulaOptimizer(policy={self.thresholds.policy!r}, {self._inner!r})"

    @property
    def _policy(self) -> GainPolicy | AgsPolicy | None:
        if self._closed or self._thresholds.policy == "none":
            return None
        return self._gain if self._thresholds.policy in ("gain", "measure") else self._ags

    def _switch(self, thresholds: ScalingThresholds) -> None:
        """Put `thresholds` in force and drop all that another policy or other bounds had measured."""
        before, self._thresholds = self._thresholds, thresholds
        moved = thresholds.small_batch_size not in (None, before.small_batch_size)
        if moved and self._meter.batch_size is None and not self._meter.observed:
            self._meter.warn(
                "the service's small_batch_size is ignored: the global batch size is unknown; give TulaOptimizer "
                "global_batch_size=, or call observe_batch with each batch"
            )
        if thresholds.policy != before.policy:
            self._gain.reset()
            self._ags.reset()
        elif any(getattr(thresholds, name) != getattr(before, name) for name in _FACTORS_DEPEND_ON):
            self._ags.forget_factors()

    def _prepare(self) -> None:
        """Arm the taps for the next step, or disarm them."""
        tap, policy = self._meter.tap, self._policy
        wanted = None if policy is None else policy.wants(self._steps, self._thresholds)
        if wanted is not None:
            tap.watch(self._meter.parameters())
        tap.arm(wanted)


def _refuse_unusable(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("optimizer is LBFGS, whose line search undoes any scaling: use a first-order optimizer")
    if is_sharded(p for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer holds sharded parameters: FSDP reduces the gradient within the backward pass and keeps none of "
            "a rank's own, with which TulaOptimizer compares it; use DDP, or train without TulaOptimizer"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            "optimizer sets its own learning rate (lr is None): give it one, which TulaOptimizer can scale"
        )


@contextmanager
def scaled_learning_rate(groups: list[dict[str, Any]], factor: float) -> Iterator[None]:
    """Every group's learning rate times `factor` inside the block; restored exactly even if the step raises.

    For SGD, Adam and their variants the update is linear in the learning rate, so this scales the update, decoupled
    weight decay included, without touching a tensor.
    """
    if factor == 1.0:
        yield
        return
    kept = [group["lr"] for group in groups]
    # One tensor given to an optimizer becomes the rate of every group without its own.
    tensors = {id(rate): rate for rate in kept if isinstance(rate, torch.Tensor)}
    values = {key: rate.clone() for key, rate in tensors.items()}
    try:
        for rate in tensors.values():
            rate.mul_(factor)
        for group in groups:
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = group["lr"] * factor
        yield
    finally:
        for key, rate in tensors.items():
            rate.copy_(values[key])
        for group, rate in zip(groups, kept, strict=True):
            group["lr"] = rate


def _gated(factor: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """`factor` where the gate is open, else exactly 1."""
    return torch.where(gate.to(factor.device) > 0, factor, torch.ones_like(factor))


def _chunks(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """`parameters` in order, in chunks of at most a _CHUNKSth of their elements, or of one parameter."""
    limit = sum(p.numel() for p in parameters) // _CHUNKS
    chunk: list[torch.Tensor] = []
    for parameter in parameters:
        if chunk and sum(p.numel() for p in chunk) + parameter.numel() > limit:
            yield chunk
            chunk = []
        chunk.append(parameter)
    yield chunk
