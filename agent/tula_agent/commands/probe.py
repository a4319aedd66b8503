"""What `tula probe` starts on each rank: times all-reduces for some seconds; the first rank prints the probe."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import tula_wire as wire
from tula_agent.measure.all_reduces import time_all_reduces
from tula_wire.samples import PROBE_MARK


def main() -> None:
    """Measure for as many seconds as the argument says, and print one line on the first rank."""
    total_s = float(sys.argv[1])
    backend: wire.Backend = "nccl" if torch.cuda.is_available() else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("tula probe: one rank reduces nothing: launch two ranks or more, as in -- torchrun --nproc-per-node 2")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        probe = wire.FabricProbe.model_validate(time_all_reduces(device, total_s))
    except ValueError as error:
        sys.exit(f"tula probe: {error}")
    finally:
        first = dist.get_rank() == 0
        dist.destroy_process_group()
    if first:
        print(f"{PROBE_MARK}{probe.model_dump_json(exclude_none=True)}", flush=True)


if __name__ == "__main__":
    main()
