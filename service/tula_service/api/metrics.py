"""`/metrics`: counters of the workers, and gauges read from the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tula_service.api.deps import AppServices
from tula_service.usecases.events import Overview, overview
from tula_wire import routes

router = APIRouter(tags=["operations"])


@router.get(routes.METRICS, response_class=Response)
def get_metrics(services: AppServices) -> Response:
    """Counters of this replica's workers; queue, agents, fits and prediction error over all replicas."""
    lines = "\n".join(_lines(overview(services.store)))
    return Response(services.metrics.render() + lines.encode() + b"\n", media_type=CONTENT_TYPE_LATEST)


def _lines(seen: Overview) -> Iterator[str]:
    by_state = {f'{{state="{state}"}}': float(number) for state, number in seen.runs_by_state.items()}
    yield from _gauge("tula_runs", "Runs by state.", by_state)
    yield from _gauge("tula_agents_seen", "Processes that measure runs which are running.", {"": seen.num_agents})
    yield from _gauge("tula_fits_kept", "Answers kept for the data they rest on.", {"": seen.num_answers})
    quantiles = {f'{{quantile="{share}"}}': value for share, value in seen.prediction_error.items()}
    yield from _gauge("tula_prediction_error_recent", "Absolute relative error of step time.", quantiles)


def _gauge(name: str, about: str, values: Mapping[str, float]) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} gauge"
    for labels, value in sorted(values.items()):
        yield f"{name}{labels} {value:g}"
