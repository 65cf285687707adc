#!/usr/bin/env bash
# Builds the images, starts the node that docker-compose.yml describes, asks it a question, kills a worker, asks again, and
# takes all of it down. Needs a container engine that runs, and root or the group docker.
#
#   tools/test_compose.sh            builds and tests; leaves the images
#   tools/test_compose.sh --clean    removes the images too
#
# Where the base image cannot be fetched it is made: Debian bookworm by debootstrap, imported under the name that the
# Dockerfiles expect. Jaeger, Prometheus and Grafana are not part of this test.
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=python:3.11-slim-bookworm
REDIS=redis:7.4-bookworm
SERVICES=(nvme_io ann_offload migration_controller gpu_worker gateway)
OFFLOAD_WORKERS=4
URL=http://127.0.0.1:8000
START_S=900

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

docker info >/dev/null 2>&1 || die 'no container engine answers: start one (Debian: apt-get install docker.io docker-compose debootstrap, then dockerd)'
if docker compose version >/dev/null 2>&1; then
  COMPOSE=(docker compose)
elif command -v docker-compose >/dev/null; then
  COMPOSE=(docker-compose)
else
  die 'neither `docker compose` nor docker-compose is there: install one'
fi

make_base() {
  local folder
  folder=$(mktemp -d)
  say "the base image cannot be fetched: debootstrap makes one in $folder"
  command -v debootstrap >/dev/null || die 'debootstrap is missing: install it'
  debootstrap --variant=minbase --include=ca-certificates,g++,python3,python3-dev,python3-venv,redis-server,redis-tools \
    bookworm "$folder" >"$folder.log" || { tail "$folder.log" >&2; die 'debootstrap failed'; }
  tar --directory "$folder" --create . | docker import - "$BASE" >/dev/null
  rm -rf "$folder" "$folder.log"
}

finish() {
  local code=$?
  if [ "$code" -ne 0 ]; then
    "${COMPOSE[@]}" ps || true
    "${COMPOSE[@]}" logs --tail=50 || true
  fi
  say 'taking the node down'
  "${COMPOSE[@]}" down --volumes --timeout 40 >/dev/null 2>&1 || true
  exit "$code"
}

ask() {
  curl --silent --show-error --fail --max-time 120 "$URL/v1/completions" --header 'Content-Type: application/json' \
    --data '{"model": "'"$1"'", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}' |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'
}

wait_healthy() {
  local service=$1 wanted=$2 end=$((SECONDS + START_S)) id healthy
  while :; do
    healthy=0
    for id in $("${COMPOSE[@]}" ps -q "$service"); do
      [ "$(docker inspect --format '{{.State.Health.Status}}' "$id")" = healthy ] && healthy=$((healthy + 1))
    done
    [ "$healthy" -ge "$wanted" ] && return
    [ "$SECONDS" -lt "$end" ] || die "$service: $healthy of $wanted healthy after $START_S s"
    sleep 1
  done
}

docker image inspect "$BASE" >/dev/null 2>&1 || docker pull --quiet "$BASE" >/dev/null 2>&1 || make_base
docker image inspect "$REDIS" >/dev/null 2>&1 || docker pull --quiet "$REDIS" >/dev/null 2>&1 || docker tag "$BASE" "$REDIS"

INDEX=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
for service in "${SERVICES[@]}"; do
  say "image of $service"
  docker build --quiet --network host --build-arg "PIP_INDEX_URL=$INDEX" --file "services/$service/Dockerfile" \
    --tag "h3/$service:0.1.0" . >/dev/null
done
for service in nvme_io ann_offload migration_controller gateway; do
  docker run --rm --entrypoint python3 "h3/$service:0.1.0" -c \
    'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)' || die "$service carries torch"
done

trap finish EXIT
say 'starting the node'
"${COMPOSE[@]}" up --detach --no-build --scale "ann_offload=$OFFLOAD_WORKERS" "${SERVICES[@]}" redis
for service in "${SERVICES[@]}"; do
  wait_healthy "$service" "$([ "$service" = ann_offload ] && echo "$OFFLOAD_WORKERS" || echo 1)"
  for id in $("${COMPOSE[@]}" ps -q "$service"); do
    [ "$(docker exec "$id" id -u)" = 10001 ] || die "$service runs as another user"
  done
  say "$service is healthy"
done

MODEL=$(curl --silent --fail "$URL/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
BEFORE=$(ask "$MODEL")
say "answer: $BEFORE"
BACKEND=$("${COMPOSE[@]}" exec -T nvme_io python3 -c \
  'import urllib.request as u; print(u.urlopen("http://127.0.0.1:9403/metrics").read().decode())' |
  sed -n 's/^h3_io_backend{.*backend="\([a-z_]*\)".*} 1.0$/\1/p')
say "the cold store is read by: ${BACKEND:-nothing: there is none}"

say 'killing one ann_offload'
docker kill --signal KILL "$("${COMPOSE[@]}" ps -q ann_offload | head -n 1)" >/dev/null
[ "$(ask "$MODEL")" = "$BEFORE" ] || die 'another answer after a worker was killed'
say 'killing migration_controller'
docker kill --signal KILL "$("${COMPOSE[@]}" ps -q migration_controller)" >/dev/null
[ "$(ask "$MODEL")" = "$BEFORE" ] || die 'another answer without the controller'
wait_healthy migration_controller 1
say 'all is well'

if [ "${1:-}" = --clean ]; then
  trap - EXIT
  "${COMPOSE[@]}" down --volumes --timeout 40 >/dev/null 2>&1
  printf "h3/%s:0.1.0 " "${SERVICES[@]}" | xargs docker rmi >/dev/null 2>&1 || true
fi
