"""Where a step's time goes in each of the candidates worth looking at."""

from __future__ import annotations

from tula_service.dashboard.charts.candidates import landmarks
from tula_service.dashboard.charts.drawing import field, finish, layer, layered, message, outlined, stacked
from tula_service.dashboard.charts.style import Row, Spec, time_unit
from tula_wire import Candidate, Job, Recommendation
from tula_wire.format import configuration

MOST = 8
_ROW = 46
"""Height of a candidate in points: landmarks and name stand above its bar, where no narrow chart cuts them."""
_PARTS = (
    ("compute_time_s", "compute"),
    ("exposed_comm_time_s", "exposed communication"),
    ("skew_s", "waiting for stragglers"),
    ("input_time_s", "input"),
)


def step_breakdown(job: Job, recommendation: Recommendation) -> Spec:
    """Stacked parts of the predicted step time: landmarks first, then the rest of the frontier, then the quickest."""
    title = f"{job.name}: where a step's time goes"
    drawn = [candidate for candidate in _interesting(recommendation) if candidate.terms is not None]
    if not drawn:
        return message(title, "No split of the step yet: it needs runs on at least two cluster sizes.")
    unit = time_unit(candidate.step_time_s.value for candidate in drawn)
    names_of: dict[str, list[str]] = {}
    for landmark, candidate in landmarks(recommendation):
        names_of.setdefault(configuration(candidate.configuration), []).append(landmark)
    rows: list[Row] = []
    labels: list[Row] = []
    for place, candidate in enumerate(drawn):
        assert candidate.terms is not None
        name = configuration(candidate.configuration)
        labels.append({"place": place, "name": name, "landmarks": ", ".join(names_of.get(name, ()))})
        for order, (term, part) in enumerate(_PARTS):
            seconds: float = getattr(candidate.terms, term)
            rows.append(
                {"configuration": name, "place": place, "part": part, "order": order, "value": seconds / unit.size}
            )
    band = field("place:O", scale={"paddingInner": 0, "paddingOuter": 0}, axis=None)
    tips = [
        field("configuration", title="Configuration"),
        field("part", title="Part"),
        field("value:Q", title=unit.name, format=",.3~g"),
    ]
    bars = {"y": band, "tooltip": tips, **stacked(rows, [part for _, part in _PARTS], f"Step time ({unit.name})")}
    line: Spec = {"align": "left", "baseline": "middle", "x": 2, "fontSize": 11}
    chart = layered(
        layer("parts", "bar", bars, where="datum.value > 0", size=13, yOffset=13),
        *outlined("labels", {"y": band, "text": field("landmarks")}, **line, yOffset=-16, fontWeight="bold"),
        *outlined("labels", {"y": band, "text": field("name")}, **line, yOffset=-3),
        height={"step": _ROW},
    )
    return finish(chart, title, "Predicted, per step of the global batch named", {"parts": rows, "labels": labels})


def _interesting(recommendation: Recommendation) -> list[Candidate]:
    frontier = set(recommendation.frontier)
    ranked = [candidate for _, candidate in landmarks(recommendation)]
    rest = sorted(recommendation.candidates, key=lambda candidate: candidate.total_time_s.value)
    ranked += [c for c in rest if c.configuration in frontier]
    ranked += [c for c in rest if c.excluded_by is None]
    return list({candidate.configuration: candidate for candidate in ranked}.values())[:MOST]
