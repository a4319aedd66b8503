"""Draws test accuracy and gradient variability by method, and both over the steps of one run (figure 6)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.generalization.train import Result

_PLOTTED = ("small batch", "LBT", "linear, cut", "LARS", "AGS", "Tula default")


def write_plots(results: Sequence[Result], directory: Path, *, stem: str) -> list[Path]:
    """Write PNG files to `directory`, which must exist; return their paths."""
    import altair as alt

    rows: list[dict[str, Any]] = []
    for result in results:
        if result.method in _PLOTTED:
            dataset, network, batch = result.case.split("/")
            rows.append({**result.row(), "net": f"{dataset}/{network}", "batch": int(batch.partition("@")[0])})
    data = alt.Data(values=rows)
    colour = alt.Color("method:N", sort=list(_PLOTTED), title=None)
    by_batch = (
        alt.Chart(data)
        .mark_line(point=True)
        .encode(
            x=alt.X("batch:Q", scale=alt.Scale(type="log", base=2), title="global batch size"),
            y=alt.Y("mean(test):Q", scale=alt.Scale(zero=False), title="test accuracy, %"),
            color=colour,
        )
        .properties(width=220, height=160)
        .facet(alt.Facet("net:N").title(None), columns=3)
        .resolve_scale(y="independent")
    )
    variability = (
        alt.Chart(data)
        .mark_point(filled=True, opacity=0.7)
        .encode(
            x=alt.X("variability:Q", scale=alt.Scale(type="log"), title="median gradient variability (equation 5)"),
            y=alt.Y("test:Q", scale=alt.Scale(zero=False), title="test accuracy, %"),
            color=colour,
        )
        .properties(width=220, height=160)
        .facet(alt.Facet("net:N").title(None), columns=3)
        .resolve_scale(y="independent")
    )
    written = []
    for name, chart in (("accuracy-by-batch", by_batch), ("variability-accuracy", variability)):
        path = directory / f"{stem}-{name}.png"
        chart.save(str(path), ppi=110)
        written.append(path)
    return written


def write_steps(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw figure 6 for each network: every step's variability (log axis), the accuracy, and lines where the rate
    decays.
    """
    import altair as alt

    x = alt.X("step:Q", title="step (dashed: the learning rate decays)")
    rows = []
    for name in dict.fromkeys(step["network"] for step in steps):
        run = [dict(step) for step in steps if step["network"] == name]
        decays = [after for before, after in itertools.pairwise(run) if after["rate_factor"] < before["rate_factor"]]
        rules = alt.Chart(alt.Data(values=decays)).mark_rule(strokeDash=[4, 4], color="grey").encode(x=x)
        line = alt.Chart(alt.Data(values=run)).mark_line(strokeWidth=1)
        panels = [
            (line.encode(x=x, y=alt.Y(column, title=title, scale=scale)) + rules).properties(
                width=330, height=150, title=name
            )
            for column, title, scale in (
                ("variability:Q", "gradient variability", alt.Scale(type="log")),
                ("test:Q", "test accuracy, %", alt.Scale(zero=False)),
            )
        ]
        rows.append(alt.hconcat(*panels))
    alt.vconcat(*rows).save(str(path), ppi=110)
