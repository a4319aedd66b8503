"""Two pictures: test accuracy against batch size by method, and gradient variability against accuracy (figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.generalization.train import Result

_PLOTTED = ("small batch", "LBT", "linear, cut", "LARS", "AGS", "Tula default")


def write_plots(results: Sequence[Result], directory: Path, *, stem: str) -> list[Path]:
    """PNG files in `directory`, which must exist; returns their paths."""
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
