"""Tensors here are tiny: a second thread would only wait for the first, for minutes on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
