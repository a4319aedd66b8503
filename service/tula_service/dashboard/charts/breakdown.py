"""Where a step's time goes in each of the candidates worth looking at."""

from __future__ import annotations

import altair as alt

from tula_service.dashboard.charts.candidates import configuration_name, landmarks
from tula_service.dashboard.charts.spec import PALETTE, WIDTH, Row, Spec, finish, message, time_unit
from tula_wire import Candidate, Job, Recommendation

__all__ = ["step_breakdown"]

MOST = 12
_LINE = "|"
"""Between the two lines of a label."""
_PARTS = (
    ("compute_time_s", "compute"),
    ("exposed_comm_time_s", "exposed communication"),
    ("skew_s", "waiting for stragglers"),
    ("input_time_s", "input"),
)


def step_breakdown(job: Job, recommendation: Recommendation) -> Spec:
    """Stacked parts of the predicted step time: landmarks first, then the rest of the frontier, then the quickest."""
    title = f"{job.name}: where a step's time goes"
    shown = [candidate for candidate in _interesting(recommendation) if candidate.terms is not None]
    if not shown:
        return message(title, "No split of the step yet: it needs runs on at least two cluster sizes.")
    unit = time_unit(candidate.step_time_s.value for candidate in shown)
    told: dict[str, list[str]] = {}
    for landmark, candidate in landmarks(recommendation):
        told.setdefault(configuration_name(candidate.configuration), []).append(landmark)
    rows: list[Row] = []
    for order, candidate in enumerate(shown):
        assert candidate.terms is not None
        name = configuration_name(candidate.configuration)
        label = name + (_LINE + ", ".join(told[name]) if name in told else "")
        for rank, (field, part) in enumerate(_PARTS):
            seconds: float = getattr(candidate.terms, field)
            rows.append(
                {
                    "configuration": name,
                    "label": label,
                    "order": order,
                    "part": part,
                    "rank": rank,
                    "value": seconds / unit.size,
                }
            )
    parts = [part for _, part in _PARTS if any(row["value"] > 0 for row in rows if row["part"] == part)]
    bars = (
        alt.Chart(alt.NamedData("parts"), width=WIDTH, height=alt.Step(27))
        .transform_filter("datum.value > 0")
        .mark_bar(tooltip=True)
        .encode(
            x=alt.X("value:Q").stack("zero").title(f"Step time ({unit.name})").axis(tickCount=6),
            y=alt.Y("label:N")
            .sort(alt.EncodingSortField(field="order", op="min"))
            .title(None)
            .axis(labelExpr=f"split(datum.label, '{_LINE}')", labelLineHeight=11),
            color=alt.Color("part:N")
            .scale(domain=parts, range=list(PALETTE[: len(parts)]))
            .legend(title=None, orient="top", columns=2),
            order=alt.Order("rank:Q"),
            tooltip=[
                alt.Tooltip("configuration:N", title="Configuration"),
                alt.Tooltip("part:N", title="Part"),
                alt.Tooltip("value:Q", title=unit.name, format=",.3~g"),
            ],
        )
    )
    return finish(bars, title, "Predicted, per step of the global batch named", {"parts": rows})


def _interesting(recommendation: Recommendation) -> list[Candidate]:
    frontier = set(recommendation.frontier)
    ranked = [candidate for _, candidate in landmarks(recommendation)]
    rest = sorted(recommendation.candidates, key=lambda candidate: candidate.total_time_s.value)
    ranked += [c for c in rest if c.configuration in frontier]
    ranked += [c for c in rest if c.excluded_by is None]
    return list({candidate.configuration: candidate for candidate in ranked}.values())[:MOST]
