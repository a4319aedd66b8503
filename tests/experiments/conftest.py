"""Limits torch to one thread: on these tiny tensors, a second thread would only wait, for minutes on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
