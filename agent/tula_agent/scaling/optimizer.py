"""Wraps any optimizer, and scales its steps at a large batch size by the same factor on every rank.

w <- w - r eta u        u: the wrapped optimizer's update, which `gain` turns under SGD; eta: its learning rate;
                        r: the policy's factor (under `ags`, one for each element)
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from tula_agent.scaling.ags import AgsRule, GatedFactors
from tula_agent.scaling.policies import (
    SERVED_SLOTS,
    Ags,
    Gain,
    Numbers,
    Policy,
    Served,
    Static,
    numbers_in_force,
    policy_named,
)
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.rule import STATE_SIZE, GainRule, is_plain
from tula_agent.scaling.statistics import GradientStatistics
from tula_agent.torch_private import is_sharded

_STATE_KEY, _FACTOR_KEY = "tula", "tula_factor"

OWN_RATE = (
    "the wrapped optimizer changes its learning rate within step(). A relative change is kept, but a rate that step() "
    "sets is not scaled: set learning rates outside step(), or wrap the inner optimizer instead"
)


def _of_inner(name: str) -> Any:
    """Return a property that reads and replaces an attribute of the wrapped optimizer."""
    return property(lambda self: getattr(self._inner, name), lambda self, value: setattr(self._inner, name, value))


class TulaOptimizer(torch.optim.Optimizer):
    """Wraps `optimizer`, scales its steps, and delegates everything else.

    The class wraps `step` instead of using hooks for three reasons: the learning rate is restored even if the step
    raises, a GradScaler always unscales first (even for fused optimizers), and the scaling state is part of
    `state_dict`.

    policy: a policy from `tula_agent.scaling`, or the name of a policy, which is used with its defaults. Under SGD,
    `Gain()` multiplies the learning rate by the noise gain and turns the steps of matrices; under other optimizers, it
    multiplies the learning rate by the gain's square root. `Ags()` applies Algorithm 1, and `Static(scale)` applies
    equation 8, to the gradient under plain SGD and to the update under any other optimizer. `Measure()` only measures
    the gradient noise scale. `Off()`, named `none`, does nothing. global_batch_size: B, the number of examples per step
    over all ranks; if omitted, B is counted from the observed batches. small_batch_size: b_small, the batch size for
    which the learning rate was chosen; the default is the batch size of one rank or micro-step. process_group: the
    group of ranks that share the model.

    Neither the service nor a checkpoint ever changes these arguments. Every rank must construct the optimizer with the
    same arguments and take the same number of steps, since the ranks reduce measurements together. Raises TypeError if
    `optimizer` is not an optimizer. Raises ValueError if a number is out of range, if a parameter group has no `lr`, or
    if parameters are sharded (FSDP, tensor parallelism), since no rank then keeps its own gradient for comparison. The
    first `step` raises ValueError if `small_batch_size` is given but the global batch size is unknown.
    """

    _step_supports_amp_scaling = False  # GradScaler must unscale first, whatever the wrapped optimizer supports

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        policy: Policy | str = "gain",
        global_batch_size: int | None = None,
        small_batch_size: int | None = None,
        process_group: Any = None,
    ) -> None:
        _refuse_unusable(optimizer)
        for name, size in (("global_batch_size", global_batch_size), ("small_batch_size", small_batch_size)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}: use 1 or more examples")
        self._inner = optimizer
        # Set up the base class without its `__init__`, which would register the parameters a second time.
        super().__setstate__({})
        self._arguments = {"global_batch_size": global_batch_size, "small_batch_size": small_batch_size}
        self._process_group = process_group
        self.policy = policy_named(policy)
        self._statistics = GradientStatistics(optimizer, Ranks(process_group), global_batch_size=global_batch_size)
        self._rule = _rule(self._statistics, self.policy)
        self._steps, self._progress, self.epoch = 0, 0.0, 0
        self._closed = self._size_known = False
        self._prepare()

    # Schedulers and frameworks read and replace these three attributes, which belong to the wrapped optimizer.
    param_groups: list[dict[str, Any]] = _of_inner("param_groups")
    state: Any = _of_inner("state")
    defaults: dict[str, Any] = _of_inner("defaults")

    # The wrapped optimizer creates and loads its state, so its own hooks apply to this state.
    register_state_dict_pre_hook = _of_inner("register_state_dict_pre_hook")
    register_state_dict_post_hook = _of_inner("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _of_inner("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _of_inner("register_load_state_dict_post_hook")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the wrapped optimizer."""
        return self._inner

    @property
    def numbers(self) -> Numbers:
        """Return the values that now apply on all ranks."""
        return numbers_in_force(self.policy, self._arguments["small_batch_size"], self._statistics.served)

    @property
    def progress(self) -> float:
        """Return the number of steps so far, each weighted by its `gain` factor (AdaScale's progress) or by 1.

        The number is equal on all ranks. If a step replaces r steps at the small batch size, a schedule for the small
        batch size continues at this position: `scheduler = LambdaLR(optimizer, lambda _: decay(optimizer.progress))`.
        """
        return self._progress

    def use_served(self, served: Served) -> None:
        """Request the values in `served`; the first rank's request applies to all ranks in the step after a
        measurement.

        This method can safely be called from another thread, since it assigns a single reference.
        """
        self._statistics.pulled = served

    def observe_batch(self, batch: Any, *, size: float | None = None, share: float | None = None) -> None:
        """Observe this rank's batch of a step or micro-step (nested tensors whose first dimension counts examples).

        size: the size to count instead of the number of examples, such as the number of tokens for sequences of unequal
        length; batch sizes and the noise scale are then in tokens. share: the fraction of each batch that the script
        receives from now on; the agent sets it while a launch measures smaller batch sizes, and B is then this fraction
        of `global_batch_size`. A reference to the last batch is kept until `step`.
        """
        self._statistics.observe(batch, size)
        if share is not None:
            self._statistics.share = share

    def next_epoch(self) -> None:
        """Begin an epoch; every rank must call this.

        In the epoch's first step, `ags` refreshes its factors unless `steps_per_epoch` is set."""
        self.epoch += 1
        if self._rule is not None:
            self._rule.next_epoch(self._steps)
        self._prepare()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one scaled step; `closure` is evaluated once, before the factor is computed. The first step is not
        scaled.

        A step without a backward pass and with a learning rate of 0 is not counted and only runs the wrapped optimizer;
        torch.distributed.checkpoint takes such a step to create an optimizer's state.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._makes_state():
            self._inner.step()
            return loss
        if not self._size_known:
            self._refuse_unknown_batch()
        statistics, rule = self._statistics, None if self._closed else self._rule
        factors: float | GatedFactors = 1.0
        if rule is not None:
            statistics.tap.watch(statistics.parameters())
            factors = rule.factors(self._steps, self.numbers)
            statistics.check_taps()
        self._apply(factors)
        self._steps += 1
        self._progress += factors if isinstance(factors, float) else 1.0
        statistics.forget_batch()
        self._prepare()
        return loss

    def _makes_state(self) -> bool:
        rates = [group["lr"] for group in self._inner.param_groups]
        on_host = not any(isinstance(rate, torch.Tensor) and rate.device.type != "cpu" for rate in rates)
        return not self._statistics.tap.seen and on_host and not any(rates)

    def _refuse_unknown_batch(self) -> None:
        """Raise ValueError if b_small is given but B is unknown, since the maximum factor would be several times too
        high.
        """
        needed = self._arguments["small_batch_size"] is not None and self.policy.name in ("gain", "ags")
        if needed and self._statistics.batch_size is None and not self._statistics.observed:
            raise ValueError(
                "small_batch_size is given, but the global batch size is unknown: "
                "pass global_batch_size= to TulaOptimizer, or call observe_batch with each batch"
            )
        self._size_known = True

    def _apply(self, factors: float | GatedFactors) -> None:
        """Take the wrapped optimizer's step with `factors`; only this method applies factors to weights."""
        if isinstance(factors, float):
            if scaled_step(self._inner, factors):
                self._statistics.warn(OWN_RATE)
            if isinstance(self._rule, GainRule) and not self._closed:
                self._rule.turn(factors)
            return
        pairs = zip(self._statistics.parameters(), factors.by_parameter, strict=True)
        scaled = [(p, f) for p, f in pairs if f is not None and p.grad is not None and not p.grad.is_sparse]
        if is_plain(self._inner):
            for parameter, factor in scaled:
                assert parameter.grad is not None
                parameter.grad.mul_(_gated(factor, factors.gate).to(parameter.device, parameter.grad.dtype))
            self._inner.step()
            return
        # w <- w_before + s (w - w_before), which is exactly w if the gate is 0 or s is 1.
        before = [p.detach().clone() for p, _ in scaled]
        self._inner.step()
        for (parameter, factor), old in zip(scaled, before, strict=True):
            scale = _gated(factor, factors.gate).to(parameter.device, parameter.dtype)
            torch.lerp(old, parameter, scale.expand_as(parameter), out=parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as the wrapped optimizer does; also clear the sums that a skipped step left in the taps."""
        self._inner.zero_grad(set_to_none=set_to_none)
        self._statistics.tap.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; the group's parameters are watched from the next backward pass on."""
        self._inner.add_param_group(param_group)
        self._prepare()

    def telemetry(self) -> dict[str, float]:
        """Return the values of the last steps that have reached the host, keyed by telemetry column."""
        numbers, rule = self.numbers, None if self._closed else self._rule
        base = {"thresholds_version": float(self._statistics.served.version), "step": float(self._steps)}
        if self.policy.name in ("ags", "static"):
            base["delta"] = numbers.delta
        if numbers.small_batch_size is not None:
            base["small_batch_size"] = float(numbers.small_batch_size)
        measured = {} if rule is None else rule.telemetry(numbers)
        return {**{name: value for name, value in measured.items() if not math.isnan(value)}, **base}

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; its first group's entry `tula` has all numbers that determine later
        factors.

        The entry `tula` is equal on all ranks. It is part of the group because torch.distributed.checkpoint, ZeRO and
        FSDP's helpers save a group's values, and it has the same length under every policy because these helpers load
        values in place. The factors of `ags` are in the state of their parameters.
        """
        kind = -1.0 if self._rule is None else float(isinstance(self._rule, AgsRule))
        rule = [] if self._rule is None else self._rule.state()
        served = self._statistics.served.to_vector()
        unused = [math.nan] * (STATE_SIZE + len(self._statistics.parameters()) - len(rule))
        numbers = [float(self._steps), self._progress, float(self.epoch), kind, *served, *rule, *unused]
        factors = self._rule.saved_factors() if isinstance(self._rule, AgsRule) else []
        saved = self._inner.state_dict()
        state = {key: dict(value) for key, value in saved["state"].items()}
        for place, factor in enumerate(factors):
            if factor is not None:
                state.setdefault(place, {})[_FACTOR_KEY] = factor
        first, *rest = saved["param_groups"]
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return {**saved, "state": state, "param_groups": [{**first, _STATE_KEY: own}, *rest]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit from `state_dict`; if it has no entry `tula`, scaling starts afresh.

        This optimizer keeps its own policy and arguments. Measurements from another policy are ignored.
        """
        first, *rest = state_dict["param_groups"]
        groups = [{key: value for key, value in first.items() if key != _STATE_KEY}, *rest]
        # These are names if torch.distributed.checkpoint loads the state, or else indices.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        factors = [state_dict["state"].get(key, {}).get(_FACTOR_KEY) for key in keys]
        state = {
            key: {name: x for name, x in value.items() if name != _FACTOR_KEY} if isinstance(value, dict) else value
            for key, value in state_dict["state"].items()
        }
        self._inner.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        self._rule = _rule(self._statistics, self.policy)
        self._steps, self._progress, self.epoch = 0, 0.0, 0
        own = first.get(_STATE_KEY)
        if own is not None:
            self._load_own(own.tolist(), factors)
        self._prepare()

    def _load_own(self, saved: list[float], factors: list[torch.Tensor | None]) -> None:
        steps, self._progress, epoch, kind, *numbers = saved
        self._steps, self.epoch = int(steps), int(epoch)
        self._statistics.served = Served.from_vector(numbers[:SERVED_SLOTS])
        if self._rule is None or kind != float(isinstance(self._rule, AgsRule)):
            return
        self._rule.load(numbers[SERVED_SLOTS:])
        if isinstance(self._rule, AgsRule):
            self._rule.load_factors(factors, self.numbers)

    def close(self) -> None:
        """Remove every hook from the parameters; later steps run the wrapped optimizer unchanged."""
        self._closed = True
        self._statistics.tap.close()

    def __getattr__(self, name: str) -> Any:
        # Delegate, for example, train() and eval() of schedule-free optimizers, but not this object's own fields, which
        # may not exist yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a TulaOptimizer contains hooks and process groups and can't be pickled: save its state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> TulaOptimizer:
        copied = TulaOptimizer(
            copy.deepcopy(self._inner, memo), policy=self.policy, process_group=self._process_group, **self._arguments
        )
        copied.load_state_dict(copy.deepcopy(self.state_dict(), memo))
        return copied

    def __repr__(self) -> str:
        return f"TulaOptimizer(policy={self.policy!r}, {self._inner!r})"

    def _prepare(self) -> None:
        """Arm the taps for the next step, or disarm them."""
        tap = self._statistics.tap
        mode = None if self._closed or self._rule is None else self._rule.wants(self._steps)
        if mode is not None:
            tap.watch(self._statistics.parameters())
        tap.arm(mode)


def _rule(statistics: GradientStatistics, policy: Policy) -> GainRule | AgsRule | None:
    if isinstance(policy, Gain):
        return GainRule(statistics, policy)
    return AgsRule(statistics, policy) if isinstance(policy, (Ags, Static)) else None


def _refuse_unusable(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("optimizer is LBFGS, whose line search undoes any scaling: use a first-order optimizer")
    if is_sharded(p for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer has sharded parameters, so no rank keeps its own gradient, which TulaOptimizer needs for "
            "comparison: use DDP, or train without TulaOptimizer"
        )
    if any(group.get("lr") is None for group in optimizer.param_groups):
        raise ValueError(
            "optimizer sets its own learning rate (lr is None): set lr to a number that TulaOptimizer can scale"
        )


def scaled_step(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Take a step with each group's learning rate times `factor`; restore the rates exactly, even if the step raises.

    For SGD, Adam and their variants, the update is linear in the learning rate. So the factor scales the update,
    including decoupled weight decay, without an operation on the update's tensors. If the step changes a rate, the
    relative change is kept and the function returns True. Rates that are tensors are not checked, since a check would
    wait for the device.
    """
    if factor == 1.0:
        optimizer.step()
        return False
    groups = list(optimizer.param_groups)  # the step may add a group
    kept = [group["lr"] for group in groups]
    # If a tensor is passed to an optimizer as its rate, all groups without a separate rate share this tensor.
    tensors = {id(rate): (rate, rate.clone()) for rate in kept if isinstance(rate, torch.Tensor)}
    for rate, _ in tensors.values():
        rate.mul_(factor)
    scaled = [rate if isinstance(rate, torch.Tensor) else rate * factor for rate in kept]
    for group, rate in zip(groups, scaled, strict=True):
        group["lr"] = rate
    changed = False
    try:
        optimizer.step()
    finally:
        for rate, before in tensors.values():
            rate.copy_(torch.where(rate == before * factor, before, rate / factor))
        for group, before, used in zip(groups, kept, scaled, strict=True):
            if group["lr"] is used or group["lr"] == used:
                group["lr"] = before
            else:
                changed, group["lr"] = True, group["lr"] / factor
    return changed


def _gated(factor: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `factor` if the gate is open (1), or else exactly 1."""
    return torch.where(gate.to(factor.device) > 0, factor, torch.ones_like(factor))
