#!/usr/bin/env bash
# Starts docker-compose.yml as described in docs/deploy.md, with a token, Postgres, the migration, two workers and
# Prometheus; then stops it and starts it again. COMPOSE is "docker compose" or podman-compose. The image tula:VERSION
# is built if it is missing. This script requires a container engine, so it is part of the release checklist and not of
# `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra COMPOSE <<<"${COMPOSE:-docker compose}"
URL=http://127.0.0.1:8321
folder=$(mktemp -d)
export POSTGRES_PASSWORD=$(od -An -N12 -tx1 /dev/urandom | tr -d " ") TULA_METRICS_TOKEN_FILE=$folder/metrics-token GRAFANA_PASSWORD_FILE=$folder/grafana-password
stack=("${COMPOSE[@]}" --project-name "tula-try-$$")

finish() { "${stack[@]}" --profile monitoring down --volumes >/dev/null 2>&1 || true; rm -r "$folder"; }
trap finish EXIT
fail() { echo "FAILED: $*" >&2; "${stack[@]}" logs service 2>&1 | tail -20 >&2 || true; exit 1; }
token() { "${stack[@]}" run --rm -T service token create "$@" --json | python3 -c 'import json, sys; print(json.loads(sys.stdin.read().strip().splitlines()[-1])["secret"])'; }
ask() { curl --silent --fail --header "Authorization: Bearer $TOKEN" --header 'Content-Type: application/json' "$URL$1" "${@:2}"; }
start() {
  "${stack[@]}" "$@" up --detach >/dev/null
  for _ in $(seq 120); do curl --silent --fail "$URL/readyz" >/dev/null && return; sleep 0.5; done
  fail "the service was not ready within a minute (/readyz)"
}

touch "$folder/metrics-token"
od -An -N12 -tx1 /dev/urandom | tr -d " " >"$folder/grafana-password"
# Wait for Postgres here, since not every engine waits for the health check that depends_on requires.
"${stack[@]}" up --detach postgres >/dev/null
for _ in $(seq 60); do "${stack[@]}" exec -T postgres pg_isready --username tula --dbname tula >/dev/null 2>&1 && break; sleep 1; done
TOKEN=$(token me --scope admin)
token prometheus --scope read >"$folder/metrics-token"
chmod 0644 "$folder/metrics-token" "$folder/grafana-password"
"${stack[@]}" down >/dev/null
echo "tokens were created in the migrated Postgres database before the service listens"
start
workers=$("${stack[@]}" exec -T service python -c 'import pathlib
print(sum(b"spawn_" + b"main" in p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")))')
[ "$workers" = 2 ] || fail "$workers workers instead of 2"
echo "the service is ready and has two workers"
JOB=$(ask /v1/jobs --data '{"name": "tried", "model": {"name": "resnet50"}, "dataset": {"size": 50000}, "epochs": 90,
  "cluster": {"max_nodes": 4}, "batch": {"max_local_batch_size": 256}}' | grep -o 'job-[0-9a-f]*' | head -1)
[ -n "$JOB" ] || fail "the job was not accepted"
start --profile monitoring
"${stack[@]}" exec -T service python -c 'import time, urllib.request as u
for _ in range(90):
    try:
        found = u.urlopen("http://prometheus:9090/api/v1/query?query=up%7Bjob%3D%22tula%22%7D", timeout=5).read()
    except OSError:
        found = b""
    if b"\"1\"" in found:
        raise SystemExit(0)
    time.sleep(0.5)
raise SystemExit("Prometheus did not reach the service: " + found.decode())' || fail "Prometheus does not scrape the service"
echo "Prometheus scrapes the service with its token"
"${stack[@]}" --profile monitoring down >/dev/null
start
ask "/v1/jobs/$JOB" >/dev/null || fail "the job was lost"
echo "after stopping and starting all services, the job still exists"
