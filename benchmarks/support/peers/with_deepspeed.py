"""DeepSpeed's autotuner over the digits with one rank, by its launcher; without arguments, the script that it tunes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# user
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "autotuning": {"enabled": True, "start_profile_step": 3, "end_profile_step": 8},
}
# end


def train() -> None:
    """Three epochs in its engine."""
    import deepspeed
    import torch

    script = importlib.import_module("digits")
    # user
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    deepspeed.add_config_arguments(parser)
    model, data = script.network(), script.digits()[0]
    engine, _, loader, _ = deepspeed.initialize(
        args=parser.parse_args(), model=model, model_parameters=model.parameters(), training_data=data
    )
    for _ in range(3):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(engine(x), y)
            engine.backward(loss)
            engine.step()
    # end


def main() -> None:
    """Tune, and answer with the batch that it found."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    least, largest = job["digits"]
    limits = {"min_train_micro_batch_size_per_gpu": least, "max_train_micro_batch_size_per_gpu": largest}
    Path("ds.json").write_text(json.dumps(CONFIG | {"autotuning": CONFIG["autotuning"] | limits}))  # type: ignore[operator]
    place = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{place}{os.pathsep}{os.environ['PATH']}"}
    began = time.monotonic()
    launch = [str(place / "deepspeed"), "--autotuning", "tune", "--num_gpus", "1", __file__]
    done = subprocess.run(
        [*launch, "--deepspeed", "--deepspeed_config", "ds.json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    best = Path("autotuning_results/ds_config_optimal.json")
    if not best.exists():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
        raise SystemExit(lines[-1] if lines else "no configuration was found")
    trials = len([path for path in best.parent.iterdir() if path.is_dir()])
    batch = json.loads(best.read_text())["train_micro_batch_size_per_gpu"]
    Path(sys.argv[2]).write_text(json.dumps({"found": [[batch, trials]], "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    train() if "--deepspeed_config" in sys.argv else main()
