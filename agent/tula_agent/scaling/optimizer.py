"""TulaOptimizer: wraps any optimizer and scales what a large batch does to the weights, alike on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from tula_agent.scaling.agreement import Agreement
from tula_agent.scaling.gain import Gain
from tula_agent.scaling.gated import Gated
from tula_agent.scaling.probe import LossFunction
from tula_agent.scaling.ranks import Ranks
from tula_agent.scaling.site import Policy, Site, Source
from tula_agent.scaling.taps import GradientTap
from tula_agent.scaling.thresholds import Granularity, PolicyName, ScalingThresholds
from tula_agent.scaling.updates import ApplyTo, resolve_target
from tula_agent.torch_private import is_sharded

__all__ = ["TulaOptimizer"]

_STATE_KEY = "tula"
_OF_FACTORS = ("granularity", "small_batch_size", "s_min", "s_max")  # what the factors of `ags` were made from


class TulaOptimizer(torch.optim.Optimizer):
    """An optimizer around `optimizer` that scales its steps; everything else is passed through.

    It wraps `step` rather than hooking into it: a learning rate is put back even when the step raises, a GradScaler
    always unscales first (also for fused optimizers), and its own state travels in `state_dict`.

    policy: `gain` multiplies the learning rate by the noise gain; `ags` is Algorithm 1 and `static` equation 8, both by
    gradient for plain SGD and by update for any other optimizer; `none` passes steps through.
    global_batch_size, small_batch_size: examples per step over all ranks, and b_small; without them b_small is the
    batch of one rank or micro-step. steps_per_epoch: where `ags` refreshes (or call `next_epoch`).
    model, loss: for a probe (`loss(module, batch)` is the mean loss) where neither ranks nor micro-steps offer a small
    batch; `observe_batch` must then be given each batch. source: `parts`, `probe`, or `auto` (parts where there are
    any). measure_every: steps between measurements of `gain`; None: each of the first 512 (8 by a probe), then every
    eighth.
    noise_weight, growth, spike_limit: of `gain`, see there; with 1.0, None and None it is AdaScale's rule.

    Every rank must construct it alike and step together (a few numbers are reduced over `process_group`).
    Raises TypeError for something that is not an optimizer, and ValueError for a senseless threshold, for sharded
    parameters (FSDP, tensor parallelism), whose local gradients are no norms of the whole, or for a group without `lr`.
    """

    _step_supports_amp_scaling = False  # GradScaler must unscale first, whatever the wrapped optimizer can do

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        policy: PolicyName = "gain",
        granularity: Granularity = "tensor",
        small_batch_size: int | None = None,
        delta: float = 0.5,
        static_scale: float = 1.0,
        s_min: float = 1e-3,
        s_max: float | None = None,
        refresh_steps: int | None = None,
        thresholds: ScalingThresholds | None = None,
        global_batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        model: nn.Module | None = None,
        loss: LossFunction | None = None,
        source: Source = "auto",
        apply_to: ApplyTo = "auto",
        measure_every: int | None = None,
        noise_weight: float = 4.0,
        growth: float | None = 1.4,
        spike_limit: float | None = 2.0,
        process_group: Any = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("optimizer is LBFGS, whose line search undoes any scaling: use a first-order optimizer")
        if is_sharded(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer holds sharded parameters (FSDP, DTensor): TulaOptimizer needs whole ones, as DDP's"
            )
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise ValueError(
                "optimizer sets its own learning rate (lr is None): give it one, for that is what is scaled"
            )
        self._inner = optimizer
        # How the base class sets up an instance that it did not initialise; it registers no parameter twice.
        super().__setstate__({})
        chosen = thresholds or ScalingThresholds(
            0, policy, granularity, delta, small_batch_size, static_scale, s_min, s_max, refresh_steps
        )
        ranks = Ranks(process_group)
        self._site = Site(optimizer, ranks, GradientTap(), chosen, global_batch_size, source, model, loss)
        self._agreement = Agreement(ranks)
        self._gain = Gain(self._site, measure_every, noise_weight, growth, spike_limit)
        self._gated = Gated(self._site, resolve_target(optimizer, apply_to), steps_per_epoch)
        self._scripted = chosen
        self._restored: int | None = None
        self._steps = 0
        self._closed = False
        self._prepare()

    # The three faces of an optimizer that others read and replace are the wrapped optimizer's own.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; schedulers write their learning rates."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self._inner

    @property
    def thresholds(self) -> ScalingThresholds:
        """Those in force on all ranks."""
        return self._site.thresholds

    @property
    def scripted_thresholds(self) -> ScalingThresholds:
        """Those of the arguments, which hold wherever the service says nothing."""
        return self._scripted

    @property
    def restore_step(self) -> int | None:
        """Not None, and the same on all ranks, while a checkpoint at or before this step should be gone back to."""
        wanted = self.thresholds.restore_step
        return None if wanted == self._restored else wanted

    def apply_thresholds(self, thresholds: ScalingThresholds) -> None:
        """Ask for new thresholds: the first rank's take force on all ranks at one step, at most 17 steps from now."""
        self._agreement.propose(thresholds)

    def observe_batch(self, batch: Any, *, global_batch_size: int | None = None) -> None:
        """The batch of the current step on this rank (nested tensors, examples first), or of each of its micro-steps.

        The last one is kept by reference until `step`.
        """
        self._site.observe(batch)
        if global_batch_size is not None:
            self._site.global_batch_size = global_batch_size

    def next_epoch(self) -> None:
        """An epoch begins on every rank: `ags` refreshes its factors."""
        self._gated.next_epoch()
        self._prepare()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One scaled step; `closure` is evaluated once, before anything is measured."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = self._site.device
        if self._steps == 0:
            self._site.thresholds = self._agreement.settle(self._site.thresholds, device)
        agreed = self._agreement.poll(self._steps, device)
        if agreed is not None:
            self._switch(agreed)
        if self._site.tap.armed and not self._site.tap.watches(self._site.parameters()):
            self._site.tap.armed = False  # what was seen belongs to other parameters
        policy = self._policy
        if policy is None:
            self._inner.step()
        else:
            policy.run(self._steps, self._inner_step)
        self._steps += 1
        self._site.forget_batch()
        self._prepare()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; what a skipped step left in the taps goes too."""
        self._inner.zero_grad(set_to_none=set_to_none)
        self._site.tap.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new parameters are watched from the next backward on."""
        self._inner.add_param_group(param_group)
        if "_site" in self.__dict__ and not self._closed:
            self._site.tap.watch(self._site.parameters())

    def telemetry(self) -> dict[str, float]:
        """What the host knows of the last steps, by telemetry column, without asking the device; no more than that."""
        policy = self._policy
        thresholds, scripted = self.thresholds, self._scripted
        base = {"thresholds_version": float(thresholds.version), "step": float(self._steps), "delta": thresholds.delta}
        if thresholds.small_batch_size is not None:
            base["small_batch_size"] = float(thresholds.small_batch_size)
        base["scripted_s_min"] = scripted.s_min  # so that the service can refuse bounds that would cross these
        if scripted.s_max is not None:
            base["scripted_s_max"] = scripted.s_max
        known = {} if policy is None else {k: v for k, v in policy.telemetry().items() if not math.isnan(v)}
        return {**known, **base}

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state and, under `tula`, all that decides the factors to come; equal on all ranks."""
        own = {
            "steps": self._steps,
            "thresholds": self._site.thresholds.to_vector(),
            "restored": self._restored,
            "agreement": self._agreement.state(),
            "gain": self._gain.state(),
            "gated": self._gated.state(),
        }
        return {**self._inner.state_dict(), _STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue bit for bit from `state_dict`; one without our part (from before wrapping) starts scaling afresh."""
        rest = {key: value for key, value in state_dict.items() if key != _STATE_KEY}
        self._inner.load_state_dict(rest)
        own = state_dict.get(_STATE_KEY)
        if own is not None:
            self._steps = int(own["steps"])
            self._site.thresholds = ScalingThresholds.from_vector(own["thresholds"])
            self._restored = own.get("restored")
            self._agreement.load(own["agreement"])
            self._gain.load(own["gain"])
            self._gated.load(own["gated"])
        self._prepare()

    def roll_back(self, state_dict: dict[str, Any] | None) -> None:
        """Go on from an older `state_dict`, on every rank alike, with the thresholds and learning rates of now.

        None: there is nothing to go back to; `restore_step` is done with all the same.
        """
        thresholds, rates = self.thresholds, [group["lr"] for group in self.param_groups]
        under_way = self._agreement.state()
        if state_dict is not None:
            self.load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate  # schedules multiply what they find, and they go on
        self._agreement.load(under_way)  # of now, not of then
        self._switch(thresholds)
        self._restored = thresholds.restore_step
        self._prepare()

    def close(self) -> None:
        """Remove every hook from the parameters; steps pass through from then on."""
        self._closed = True
        self._site.tap.close()
        self._site.tap.armed = False

    def __getattr__(self, name: str) -> Any:
        # train() and eval() of schedule-free optimizers and the like; never our own fields, which may not exist yet.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a TulaOptimizer holds hooks and process groups and can't be pickled: save its state_dict()")

    def __repr__(self) -> str:
        return f"TulaOptimizer(policy={self.thresholds.policy!r}, {self._inner!r})"

    @property
    def _policy(self) -> Policy | None:
        name = self._site.thresholds.policy
        if name == "none" or self._closed:
            return None
        return cast(Policy, self._gain if name == "gain" else self._gated)

    def _inner_step(self) -> None:
        self._inner.step()

    def _switch(self, thresholds: ScalingThresholds) -> None:
        """Put `thresholds` in force; nothing that an earlier policy or other bounds left behind decides from now on."""
        before, self._site.thresholds = self._site.thresholds, thresholds
        if thresholds.policy != before.policy:
            self._gain.begin()
            self._gated.begin()
        elif any(getattr(thresholds, name) != getattr(before, name) for name in _OF_FACTORS):
            self._gated.forget_factors()

    def _prepare(self) -> None:
        """Arm the taps for the step to come, or let them sleep."""
        tap, policy = self._site.tap, self._policy
        wanted = None if policy is None else policy.wants(self._steps)
        if wanted is None:
            tap.clear()
            tap.armed = False
            return
        tap.watch(self._site.parameters())
        tap.arm(wanted)
