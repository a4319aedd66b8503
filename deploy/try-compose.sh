#!/usr/bin/env bash
# Starts docker-compose.yml as docs/deploy.md says: a token, Postgres, the migration, two workers, Prometheus; then stops
# it and starts it again. COMPOSE is "docker compose" or podman-compose; the image tula:VERSION is built where it is missing.
# Needs an engine, so it is no part of `make test`; the release checklist asks for it.
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
  fail "no answer from /readyz within a minute"
}

touch "$folder/metrics-token"
od -An -N12 -tx1 /dev/urandom | tr -d " " >"$folder/grafana-password"
# depends_on says so; not every engine waits for a health check.
"${stack[@]}" up --detach postgres >/dev/null
for _ in $(seq 60); do "${stack[@]}" exec -T postgres pg_isready --username tula --dbname tula >/dev/null 2>&1 && break; sleep 1; done
TOKEN=$(token me --scope admin)
token prometheus --scope read >"$folder/metrics-token"
chmod 0644 "$folder/metrics-token" "$folder/grafana-password"
"${stack[@]}" down >/dev/null
echo "tokens: made in the migrated Postgres before the service listens"
start
workers=$("${stack[@]}" exec -T service python -c 'import pathlib
print(sum(b"spawn_" + b"main" in p.read_bytes() for p in pathlib.Path("/proc").glob("[0-9]*/cmdline")))')
[ "$workers" = 2 ] || fail "$workers workers instead of 2"
echo "up: ready, two workers"
JOB=$(ask /v1/jobs --data '{"name": "tried", "model": {"name": "resnet50"}, "dataset": {"size": 50000}, "epochs": 90,
  "cluster": {"max_nodes": 4}, "batch": {"max_local_batch_size": 256}}' | grep -o 'job-[0-9a-f]*' | head -1)
[ -n "$JOB" ] || fail "a job is refused"
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
raise SystemExit("Prometheus never reached the service: " + found.decode())' || fail "Prometheus does not scrape"
echo "monitoring: Prometheus scrapes the service with its token"
"${stack[@]}" --profile monitoring down >/dev/null
start
ask "/v1/jobs/$JOB" >/dev/null || fail "the job is gone"
echo "down and up again: the job is there"
