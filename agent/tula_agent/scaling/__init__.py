"""Defines the optimizer wrapper that scales gradients for large batches, and its policies."""

from __future__ import annotations

from tula_agent.scaling.optimizer import TulaOptimizer
from tula_agent.scaling.policies import Ags, Gain, Measure, Off, Policy, Static

__all__ = ["Ags", "Gain", "Measure", "Off", "Policy", "Static", "TulaOptimizer"]
