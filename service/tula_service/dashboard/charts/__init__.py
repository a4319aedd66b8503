"""Every chart of Tula, defined once: pure functions from the wire's models to Vega-Lite specifications with their data.

The page, the notebook (`job.plot()`) and PNG or SVG files render the same specification. Nothing here reads a
database or a clock; `api/charts.py` answers `GET .../charts/{name}` with them.
"""

from __future__ import annotations

from tula_service.dashboard.charts.candidates import landmarks
from tula_service.dashboard.charts.catalog import JOB_CHARTS, SERVICE_CHARTS, job_chart, service_chart
from tula_service.dashboard.charts.memory import rank_memory
from tula_service.dashboard.charts.quality import QualityRun, quality_chart
from tula_service.dashboard.charts.render import javascript, png, svg
from tula_service.dashboard.charts.series import RUN_CHARTS, columns_of, run_chart
from tula_service.dashboard.charts.style import PALETTE, Spec

__all__ = [
    "JOB_CHARTS",
    "PALETTE",
    "RUN_CHARTS",
    "SERVICE_CHARTS",
    "QualityRun",
    "Spec",
    "columns_of",
    "javascript",
    "job_chart",
    "landmarks",
    "png",
    "quality_chart",
    "rank_memory",
    "run_chart",
    "service_chart",
    "svg",
]
