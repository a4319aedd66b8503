"""Tests that timing a slow optimizer improves predictions for configurations that accumulate gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.agent.sink import Sink
from tests.support.configurations import make_configuration
from tula_agent.config import read_config
from tula_agent.run import Run
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.step_time_model import fit_step_time

STEPS = 10


def measured(sink: Sink, folder: Path, micro_steps: int) -> tuple[float, float]:
    """Return the shortest step time and optimizer time in seconds; Adam updates 400 small parameters one by one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(200)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    environ = {"TULA_URL": sink.url, "TULA_RUN_ID": f"m{micro_steps}", "TULA_SPOOL_DIR": str(folder)}
    run = Run(read_config(environ), grad_accum_steps=micro_steps)
    run.watch(model, optimizer)
    for count, batch in enumerate(run.steps([torch.randn(4, 8)] * (STEPS * micro_steps)), start=1):
        model(batch).square().mean().backward()
        if count % micro_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    run.finish()
    bodies = [body for _, path, body in sink.requests if path == f"/v1/runs/m{micro_steps}/samples"]
    rows = [row for body in bodies for row in zip(body["step_time_s"], body["optimizer_time_s"], strict=True)]
    step_s, optimizer_s = np.min(rows, axis=0)
    return float(step_s), float(optimizer_s)


def test_a_slow_optimizer_makes_accumulation_cheaper_than_its_micro_steps(sink: Sink, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        once, four_times = ([measured(sink, tmp_path, m) for m in (1, 4)] for _ in range(2))
        (once_s, optimizer_s), (truth_s, _) = map(min, zip(once, four_times, strict=True))
    finally:
        torch.set_num_threads(threads)
    one, four = (make_configuration(1, 1, 4, micro_steps) for micro_steps in (1, 4))
    plain = StepTimeObservations.at([one], [once_s])
    apart = StepTimeObservations.at([one], [once_s], optimizer_time_s=[optimizer_s])
    without, split = (
        fit_step_time(each, candidates=[one, four]).predict([four]).mean_s[0] / truth_s - 1.0 for each in (plain, apart)
    )
    print(f"optimizer {optimizer_s / once_s:.0%} of a step; four micro-steps off by {without:+.1%}, split {split:+.1%}")
    assert abs(split) < abs(without)
