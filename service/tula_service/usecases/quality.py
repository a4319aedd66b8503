"""What an example is worth in a larger batch of this job, once its training has shown the gradient noise scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tula_service.perfmodel.noise_scale import max_sensible_batch_size, statistical_efficiency
from tula_service.store import JobRecord, Transaction
from tula_service.usecases import scaling
from tula_wire import Configuration

__all__ = ["Efficiency", "efficiency_of"]


@dataclass(frozen=True)
class Efficiency:
    """Statistical efficiency (Pollux 2021, equation 7) against the smallest global batch that the job may use."""

    noise_scale: float
    base_batch_size: int

    def of(self, configuration: Configuration) -> float:
        """Progress per example, 1 at the base batch."""
        batch = configuration.global_batch_size
        return float(statistical_efficiency(batch, self.noise_scale, base_batch_size=self.base_batch_size))

    @property
    def max_sensible_batch_size(self) -> int:
        """The global batch at which an example is worth half of what it is at the base batch."""
        return max_sensible_batch_size(self.noise_scale, base_batch_size=self.base_batch_size)


def efficiency_of(tx: Transaction, job: JobRecord, candidates: Sequence[Configuration]) -> Efficiency | None:
    """The job's efficiency, or None until a training run has reported its gradient noise scale."""
    noise_scale = scaling.noise_scale_of(tx, job.id)
    if noise_scale is None:
        return None
    return Efficiency(noise_scale, min(c.global_batch_size for c in candidates))
