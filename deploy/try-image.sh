#!/usr/bin/env bash
# Builds the image and tests it as described in docs/deploy.md, with a token, a read-only root file system, and a job
# that must still exist in the next container. ENGINE is docker or podman. BUILD_FLAGS are passed to its `build`, for
# example --build-arg BASE=... for another base image. This script requires a container engine, so it is part of the
# release checklist and not of `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
ENGINE=${ENGINE:-docker}
PORT=${PORT:-18321}
NAME=tula-try-$$
URL=http://127.0.0.1:$PORT
run=(--read-only --tmpfs /tmp --volume "$NAME:/data" --env "TULA_PORT=$PORT")

finish() { "$ENGINE" rm --force "$NAME" >/dev/null 2>&1 || true; "$ENGINE" volume rm --force "$NAME" >/dev/null 2>&1 || true; }
trap finish EXIT
fail() { echo "FAILED: $*" >&2; "$ENGINE" logs "$NAME" 2>&1 | tail -5 >&2 || true; exit 1; }
start() {
  "$ENGINE" run --detach --name "$NAME" "${run[@]}" --publish "127.0.0.1:$PORT:$PORT" tula:try >/dev/null
  for _ in $(seq 60); do curl --silent --fail "$URL/readyz" >/dev/null && return; sleep 0.5; done
  fail "the service was not ready within half a minute (/readyz)"
}

# shellcheck disable=SC2086
"$ENGINE" build ${BUILD_FLAGS:-} --tag tula:try . >/dev/null
echo "built: $("$ENGINE" image inspect --format '{{.Size}}' tula:try | awk '{printf "%.0f MB", $1 / 1e6}') including the base image"

refused=$("$ENGINE" run --rm "${run[@]}" tula:try 2>&1 >/dev/null || true)
[[ $refused == *"token create"* ]] || fail "unexpected message without a token: $refused"
echo "without a token: the service refuses to listen and explains what to do"
TOKEN=$("$ENGINE" run --rm "${run[@]}" tula:try token create me --scope admin --json \
  | python3 -c 'import json, sys; print(json.load(sys.stdin)["secret"])')
start
echo "with a token: the service is ready, and runs as user $("$ENGINE" exec "$NAME" id -u)"
for path in /opt/tula/x /x /home/x; do
  "$ENGINE" exec "$NAME" sh -c "echo x > $path" 2>/dev/null && fail "$path is writable"
done
echo "the root file system is read-only"
[ "$(curl --silent --output /dev/null --write-out '%{http_code}' "$URL/v1/jobs")" = 401 ] || fail "the API is accessible without a token"
curl --silent --fail "$URL/v1/jobs" --header "Authorization: Bearer $TOKEN" --header 'Content-Type: application/json' \
  --data '{"name": "tried", "model": {"name": "resnet50"}, "dataset": {"size": 50000}, "epochs": 90,
    "cluster": {"max_nodes": 4, "price": {"usd_per_node_hour": 3.06}},
    "batch": {"min_local_batch_size": 32, "max_local_batch_size": 256}}' >/dev/null || fail "the job was not accepted"
JOB=$(curl --silent "$URL/v1/jobs" --header "Authorization: Bearer $TOKEN" | grep -o 'job-[0-9a-f]*' | head -1)
curl --silent "$URL/v1/jobs/$JOB/charts/tradeoff" --header "Authorization: Bearer $TOKEN" | grep -q schema/vega-lite \
  || fail "the chart was not returned"
echo "a job was registered, and its chart was returned"
"$ENGINE" stop --time 30 "$NAME" >/dev/null
status=$("$ENGINE" inspect --format '{{.State.ExitCode}}' "$NAME")
[ "$status" = 0 ] || fail "the service ended with status $status"
"$ENGINE" rm "$NAME" >/dev/null
start
curl --silent "$URL/v1/jobs" --header "Authorization: Bearer $TOKEN" | grep -q "$JOB" || fail "the job was lost"
echo "the service ended cleanly, and after a restart the job still exists"
