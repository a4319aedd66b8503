"""Runs one mode: python -m experiments.generalization --quick|--full|--gpu|--development [--smoke] [--json FILE]."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.support.report import provenance
from experiments.generalization.campaign import Campaign, run_mode
from experiments.generalization.cases import MODES
from experiments.generalization.plots import write_plots
from experiments.generalization.report import as_json, figures, markdown, report_case


def main(argv: Sequence[str] | None = None) -> None:
    """Run one mode and write its report; by default, `argv` is the command line."""
    parser = argparse.ArgumentParser(prog="experiments.generalization", description=__doc__)
    modes = parser.add_mutually_exclusive_group()
    for name in MODES:
        default = " (the default)" if name == "quick" else ""
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=name, help=f"mode {name}{default}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and rows to this file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the table and plots to this folder")
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="store the result of each run in FILE, and skip runs that are in FILE"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the mode's number)")
    parser.add_argument("--only", metavar="METHODS", help="run only these methods, separated by |, and write no report")
    parser.add_argument("--workers", type=int, default=1, help="number of concurrent training runs (1)")
    parser.add_argument(
        "--keep-real-ranks", action="store_true", help="reuse the row of real ranks from the report in --out"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="train two tiny cases, only to check that the program works"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    mode = MODES[arguments.mode or "quick"]
    if arguments.smoke:
        mode = mode.smoke()
    if arguments.seeds:
        mode = replace(mode, seeds=arguments.seeds)
    if mode.device == "cuda" and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device, and this machine has none: use --quick or --full")
    began = time.monotonic()
    campaign = Campaign(arguments.runs, workers=arguments.workers)
    by_case = run_mode(mode, campaign, only=arguments.only.split("|") if arguments.only else None)
    if arguments.only:
        return
    reports = [report_case(name, results) for name, results in by_case.items()]
    upper = [report_case(name, found) for name, found in run_mode(mode, campaign, upper=True).items()]
    values = figures(reports)
    if arguments.keep_real_ranks:
        before = json.loads((arguments.out / f"{mode.name}.json").read_text())
        values |= {key: value for key, value in before.items() if key.startswith("real_ddp.")}
    elif mode.real_ddp is not None:
        from experiments.generalization.real_ddp import compare

        rate = next(r.learning_rate for r in reports if r.name == mode.real_ddp.name)
        values |= compare(mode.real_ddp, mode, rate)
    values["elapsed_s"] = time.monotonic() - began
    values["cpu_s"] = math.fsum(result.cpu_s for result in campaign.results)
    text = markdown(reports, upper, values, seeds=mode.seeds)
    print(text)
    document = {
        "mode": mode.name,
        "seeds": mode.seeds,
        "torch": torch.__version__,
        **as_json(reports, upper, values),
    } | provenance()
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{mode.name}.md").write_text(text)
        (arguments.out / f"{mode.name}.json").write_text(json.dumps(document, indent=1) + "\n")
        write_plots([r for found in by_case.values() for r in found], arguments.out, stem=mode.name)


if __name__ == "__main__":
    main()
