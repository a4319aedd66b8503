"""Candidates as chart rows: one point per cluster size and global batch, labelled as people speak of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from tula_service.dashboard.charts.drawing import field, layer, legend
from tula_service.dashboard.charts.style import DASHES, FAINT, PALETTE, Row, Spec, Unit, time_unit
from tula_wire import Candidate, Estimate, Recommendation
from tula_wire.format import cluster_name, configuration

Quantity = Literal["time", "cost"]
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


def line_styles(candidates: Iterable[Candidate]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names of the clusters by instance type and size, each with its colour and its dash.

    The colour says how many nodes. The dash says the same, for those who cannot tell the colours apart, until several
    instance types compete: then it says which type.
    """
    seen = {(c.configuration.instance_type, c.configuration.num_nodes): c.configuration for c in candidates}
    types, sizes = sorted({kind for kind, _ in seen}), sorted({size for _, size in seen})
    names, colours, dashes = [], [], []
    for kind, size in sorted(seen):
        place = sizes.index(size)
        names.append(cluster_name(seen[kind, size]))
        colours.append(PALETTE[place % len(PALETTE)])
        dashes.append(list(DASHES[(place if len(types) == 1 else types.index(kind)) % len(DASHES)]))
    return names, colours, dashes


def estimate_of(candidate: Candidate, quantity: Quantity) -> Estimate | None:
    """Total time in seconds, or cost in dollars; None without prices."""
    return candidate.total_time_s if quantity == "time" else candidate.cost_usd


def points(candidates: Sequence[Candidate], quantity: Quantity) -> list[Candidate]:
    """The best candidate for each cluster size and global batch, allowed ones first, in drawing order."""
    best: dict[tuple[str, int, int], Candidate] = {}
    offered = [candidate for candidate in candidates if estimate_of(candidate, quantity) is not None]
    for candidate in sorted(offered, key=lambda each: (each.excluded_by is not None, _value(each, quantity))):
        c = candidate.configuration
        best.setdefault((c.instance_type, c.num_nodes, candidate.global_batch_size), candidate)
    return [best[key] for key in sorted(best)]


def unit_of(drawn: Sequence[Candidate], quantity: Quantity) -> Unit:
    """The unit in which these candidates' time or cost is drawn."""
    return Unit(1, "USD") if quantity == "cost" else time_unit(each.total_time_s.value for each in drawn)


def row_of(candidate: Candidate, quantity: Quantity, unit: Unit) -> Row:
    """A candidate that has this quantity, as a chart draws it."""
    estimate = estimate_of(candidate, quantity)
    assert estimate is not None
    basis = "profiled" if candidate.profiled else "extrapolated" if candidate.extrapolated else "predicted"
    return {
        "batch": candidate.global_batch_size,
        "cluster": cluster_name(candidate.configuration),
        "configuration": configuration(candidate.configuration),
        "value": estimate.value / unit.size,
        "low": estimate.low / unit.size,
        "high": estimate.high / unit.size,
        "profiled": candidate.profiled,
        "basis": f"{basis}, spot price" if candidate.spot else basis,
        "excluded": candidate.excluded_by or "",
    }


def landmarks(recommendation: Recommendation) -> list[tuple[str, Candidate]]:
    """Chosen, runner-up, least time, least cost, balanced and knee, those that exist."""
    at_knee = recommendation.knee.configuration
    named = (
        ("recommended", recommendation.chosen),
        ("runner-up", recommendation.runner_up),
        ("least time", recommendation.least_time),
        ("least cost", recommendation.least_cost),
        ("balanced", recommendation.balanced),
        ("knee", next((each for each in recommendation.candidates if each.configuration == at_knee), None)),
    )
    return [(name, candidate) for name, candidate in named if candidate is not None]


def rings(marked: Sequence[Row], x: Spec, y: Spec) -> Spec:
    """A large symbol around each row of the data set `landmarks`, which is `marked`; a legend names it by `label`."""
    labels = [row["label"] for row in marked]
    shapes = [SHAPES[place % len(SHAPES)] for place in range(len(labels))]
    named = legend(labels, lines=False) | {"orient": "bottom", "symbolSize": 120, "labelLimit": 0}
    shape = field("label", scale={"domain": labels, "range": shapes}, legend=named)
    encoding = {"x": x, "y": y, "shape": shape}
    return layer("landmarks", "point", encoding, size=300, strokeWidth=2.2, filled=False, color=FAINT, tooltip=None)


def _value(candidate: Candidate, quantity: Quantity) -> float:
    estimate = estimate_of(candidate, quantity)
    return 0.0 if estimate is None else estimate.value
