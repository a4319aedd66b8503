"""The generalization experiment: its figures, its data sets, and that every method trains."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from experiments.generalization.__main__ import main
from experiments.generalization.campaign import Campaign, run_mode
from experiments.generalization.cases import MODES, Case
from experiments.generalization.data import load
from experiments.generalization.methods import METHODS
from experiments.generalization.networks import build
from experiments.generalization.report import figures, report_case
from experiments.generalization.train import Result, decay

TINY = replace(
    MODES["full"],
    cases=(Case("digits", "residual", 256, 2),),
    seeds=1,
    epochs=6,
    learning_rates=(0.05,),
    shares=(1.0,),
    real_ddp=None,
)


def results(case: str, **tests: float) -> list[Result]:
    """One seed per method; validation equals test, except that `x8` looks best on validation and is not on test."""
    names = {"small": "small batch", "default": "Tula default", "sqrt": "sqrt LR", "polo": "post-local SGD"}
    names |= {"ags": "AGS tensor", "element": "AGS element"}
    rows = []
    for short, test in tests.items():
        validation = 99.0 if short == "x8" else test
        name = names.get(short, short)
        rows.append(Result(case, name, 0, 0.1, validation, test, False, 0.2, 1.0, 1.0))
    return rows


WIDE = {"small": 70, "LBT": 50, "LRS": 60, "sqrt": 58, "LARS": 40, "polo": 50, "ags": 57, "element": 55}
NARROW = {"small": 90, "LBT": 89, "LRS": 88, "sqrt": 89, "LARS": 80, "polo": 89, "ags": 89, "element": 89}


def test_figures_of_merit_are_computed_as_their_names_say():
    reports = [
        report_case("a", results("a", **WIDE, default=68, x4=66, x8=65)),
        report_case("b", results("b", **NARROW, default=88.8, x4=90, x8=89)),
    ]
    values = figures(reports)
    assert values["faithful.over_lbt.mean"] == pytest.approx(7.0)  # only where the small batch leads by 8
    assert values["cases.wide_gap"] == 1.0
    assert values["default.gap_recovered.mean"] == pytest.approx(18 / 20)
    assert values["default.gap_recovered_any.mean"] == pytest.approx(18 / 20)
    assert values["default.over_best_baseline.mean"] == pytest.approx((8.0 - 0.2) / 2)
    assert values["default.over_best_baseline.min"] == pytest.approx(-0.2)
    # Tuned by validation, reported on test: x8 it is, though x4 tested better.
    assert values["default.over_tuned.mean"] == pytest.approx((68 - 65 + 88.8 - 89) / 2)


def test_a_data_set_is_the_same_on_every_machine_and_in_every_process():
    digits = load("digits")
    assert [len(part) for part in (digits.train, digits.val, digits.test)] == [1024, 257, 516]
    seen = {hashlib.sha256(part.images.numpy().tobytes()).hexdigest() for part in (digits.train, digits.val)}
    assert len(seen) == 2
    load.cache_clear()
    assert torch.equal(load("digits").train.images, digits.train.images)
    for name, classes in (("glyphs", 47), ("shapes", 25)):
        images = load(name, num_train=512)
        assert (images.num_classes, images.side) == (classes, 16)
        assert bool(torch.isfinite(images.train.images).all())
        assert float(images.train.images.std()) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("network", ["vgg", "residual", "depthwise", "resnet18", "resnet50"])
@pytest.mark.parametrize("side", [8, 32])
def test_every_network_takes_every_image_size(network, side):
    model = build(network, num_classes=7, side=side)
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


def test_the_decay_is_a_tenth_from_the_middle_and_a_hundredth_from_three_quarters():
    assert [decay(epoch, 8) for epoch in range(8)] == [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]


def test_a_campaign_learns_and_trains_nothing_twice_with_the_same_file(tmp_path):
    path = tmp_path / "runs.jsonl"
    by_case = run_mode(TINY, Campaign(path), only=("LBT", "Tula default"))
    found = by_case["digits/residual/256"]
    assert {result.method for result in found} == {"small batch", "LBT", "Tula default"}
    assert max(result.test for result in found if result.method == "small batch") > 50.0
    lines = path.read_text().splitlines()
    assert run_mode(TINY, Campaign(path), only=("LBT", "Tula default")) == by_case
    assert path.read_text().splitlines() == lines


def test_a_smoke_run_of_the_development_mode_trains_every_method_and_writes_a_report(tmp_path):
    main(["--development", "--smoke", "--out", str(tmp_path), "--json", str(tmp_path / "kept.json")])
    report = json.loads((tmp_path / "kept.json").read_text())
    assert (report["mode"], report["seeds"]) == ("development", 1)
    (row,) = report["rows"]
    assert set(row["methods"]) >= {"small batch", *(method.name for method in METHODS)}
    assert not any(cell["diverged"] for cell in row["methods"].values())
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}
    assert f"| {row['case']} |" in (tmp_path / "development.md").read_text()


def test_the_gpu_mode_needs_a_gpu_and_its_data_and_networks_train(tmp_path, monkeypatch, capsys):
    mode = MODES["gpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["--gpu"])
    assert "needs a CUDA device" in capsys.readouterr().err
    for case in mode.cases:
        images = load(case.dataset, num_train=64)
        model = build(case.network, num_classes=images.num_classes, side=images.side)
        F.cross_entropy(model(images.train.images[:4]), images.train.labels[:4]).backward()
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    tiny = replace(mode, cases=(Case("shapes32", "depthwise", 64, 2),), epochs=1, num_train=64, device="cpu")
    monkeypatch.setitem(MODES, "gpu", replace(tiny, learning_rates=(0.05,), shares=()))
    main(["--gpu", "--seeds", "1", "--only", "Tula default", "--runs", str(tmp_path / "runs")])
    assert "shapes32/depthwise/64" in (tmp_path / "runs").read_text()
