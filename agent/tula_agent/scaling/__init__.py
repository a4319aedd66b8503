"""Gradient scaling for large batches: the optimizer wrapper and its policies."""

from __future__ import annotations

from tula_agent.scaling.optimizer import TulaOptimizer
from tula_agent.scaling.policies import Ags, Gain, Measure, Off, Policy, Static

__all__ = ["Ags", "Gain", "Measure", "Off", "Policy", "Static", "TulaOptimizer"]
