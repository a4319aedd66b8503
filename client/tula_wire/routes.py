"""Defines all paths of the API, which service, agent and client share."""

from __future__ import annotations

from typing import Final

JOBS: Final = "/v1/jobs"
JOB: Final = "/v1/jobs/{job_id}"
JOB_CLAIM: Final = "/v1/jobs/{job_id}/runs:claim"
JOB_RUNS: Final = "/v1/jobs/{job_id}/runs"
JOB_SAMPLES: Final = "/v1/jobs/{job_id}/samples"
JOB_RECOMMENDATION: Final = "/v1/jobs/{job_id}/recommendation"
JOB_PREDICTIONS: Final = "/v1/jobs/{job_id}/predictions"
JOB_SCHEDULE: Final = "/v1/jobs/{job_id}/schedule"
JOB_SCALING: Final = "/v1/jobs/{job_id}/scaling"
JOB_LEDGER: Final = "/v1/jobs/{job_id}/ledger"
JOB_CHART: Final = "/v1/jobs/{job_id}/charts/{name}"
JOB_EVENTS: Final = "/v1/jobs/{job_id}/events"

RUN: Final = "/v1/runs/{run_id}"
RUN_SAMPLES: Final = "/v1/runs/{run_id}/samples"
RUN_TELEMETRY: Final = "/v1/runs/{run_id}/telemetry"
RUN_PROGRESS: Final = "/v1/runs/{run_id}/progress"
RUN_VERDICT: Final = "/v1/runs/{run_id}/verdict"
RUN_CHART: Final = "/v1/runs/{run_id}/charts/{name}"

FABRICS: Final = "/v1/fabrics"

PROJECTS: Final = "/v1/projects"
TOKENS: Final = "/v1/tokens"
TOKEN: Final = "/v1/tokens/{token_id}"

HEALTH: Final = "/healthz"
READY: Final = "/readyz"
METRICS: Final = "/metrics"
