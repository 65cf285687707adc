#!/usr/bin/env bash
# Builds the images, starts the node that docker-compose.yml describes, asks it a question, kills one process after another
# and asks again, and takes all of it down. Needs a container engine that runs, and root or the group docker.
#
#   tools/test_compose.sh            builds and tests; leaves the images
#   tools/test_compose.sh --clean    removes the images too
#
# Where the base image cannot be fetched it is made: Debian bookworm by debootstrap, imported under the name that the
# Dockerfiles expect. Jaeger, Prometheus and Grafana are not part of this test. Pip's own settings of this machine hold for
# the builds: an index from the environment, and a folder of packages (find-links), which is served to them over loopback.
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=python:3.11-slim-bookworm
REDIS=redis:7.4-bookworm
SERVICES=(nvme_io ann_offload migration_controller gpu_worker gateway)
LIGHT=(nvme_io ann_offload migration_controller gateway)
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
SCRATCH=$(mktemp -d)
COMPOSE+=(--project-name h3-test --file docker-compose.yml --file "$SCRATCH/layer.yml")
LOCKED=unlimited

# Over docker-compose.yml. Builds reach what this machine reaches. An engine that is limited itself can grant no more than
# it has: then the node runs with that.
write_layer() {
  local limits=''
  if ! docker run --rm --ulimit memlock=-1 --ulimit nofile=65536 "$BASE" true 2>/dev/null; then
    LOCKED=$(($(ulimit -H -l) * 1024))
    say "the engine grants $LOCKED bytes of locked memory, $(ulimit -H -n) descriptors"
    limits=", ulimits: {memlock: {soft: $LOCKED, hard: $LOCKED}, nofile: {soft: $(ulimit -H -n), hard: $(ulimit -H -n)}}"
  fi
  {
    echo 'services:'
    printf "  %s: {build: {network: host}$limits}\n" "${SERVICES[@]}"
  } >"$SCRATCH/layer.yml"
}

make_base() {
  local folder=$SCRATCH/base
  say "the base image cannot be fetched: debootstrap makes one in $folder"
  command -v debootstrap >/dev/null || die 'debootstrap is missing: install it'
  debootstrap --variant=minbase --include=ca-certificates,libpython3.11-dev,python3,python3-venv bookworm "$folder" \
    >"$SCRATCH/debootstrap.log" || { tail "$SCRATCH/debootstrap.log" >&2; die 'debootstrap failed'; }
  rm -rf "$folder"/usr/share/{doc,locale,man}/* "$folder"/var/{cache/apt,lib/apt/lists}/* \
    "$folder"/usr/lib/python3.11/config-* "$folder"/usr/lib/*/libpython3.11.a
  # Whom this machine trusts, the image trusts.
  cat /etc/ssl/certs/ca-certificates.crt >"$folder/etc/ssl/certs/ca-certificates.crt"
  tar --directory "$folder" --create . | docker import - "$BASE" >/dev/null
  rm -rf "$folder"
}

make_redis() {
  say 'the image of redis cannot be fetched: Debian has one'
  printf 'FROM %s\nRUN apt-get update && apt-get install --yes --no-install-recommends redis-server && rm -r /var/lib/apt/lists\n' "$BASE" |
    docker build --network host --tag "$REDIS" - >"$SCRATCH/redis.log" || { tail "$SCRATCH/redis.log" >&2; die 'no redis'; }
}

fetch() { docker image inspect "$1" >/dev/null 2>&1 || docker pull --quiet "$1" >/dev/null 2>&1; }

# A folder where pip of this machine finds packages is a page of links for the builds.
serve_packages() {
  local folder=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
  [ -d "$folder" ] || return 0
  python3 -u -m http.server --bind 127.0.0.1 --directory "$folder" 0 >"$SCRATCH/packages.log" 2>&1 &
  PACKAGES_PID=$!
  until grep -q '^Serving' "$SCRATCH/packages.log"; do kill -0 "$PACKAGES_PID" || die 'packages are not served'; done
  export PIP_FIND_LINKS
  PIP_FIND_LINKS=$(sed -n 's|.*(\(http://[^)]*\)).*|\1|p' "$SCRATCH/packages.log")
}

finish() {
  local code=$?
  trap - EXIT
  if [ "$code" -ne 0 ]; then
    "${COMPOSE[@]}" ps || true
    "${COMPOSE[@]}" logs --tail=50 || true
  fi
  [ -z "${PACKAGES_PID:-}" ] || kill "$PACKAGES_PID" 2>/dev/null || true
  say 'taking the node down'
  "${COMPOSE[@]}" down --volumes --timeout 40 >"$SCRATCH/down.log" 2>&1 || { cat "$SCRATCH/down.log" >&2; code=1; }
  local left
  left=$(for kind in container volume network; do
    docker "$kind" ls --quiet $([ "$kind" = container ] && echo --all) --filter label=com.docker.compose.project=h3-test
  done)
  [ -z "$left" ] || { printf 'error: left behind: %s\n' "$left" >&2; code=1; }
  rm -rf "$SCRATCH"
  [ "$code" -ne 0 ] || say 'all is well'
  exit "$code"
}

containers() {
  docker ps --all --quiet --filter label=com.docker.compose.project=h3-test --filter "label=com.docker.compose.service=$1"
}

wait_healthy() {
  local service=$1 wanted=$2 end=$((SECONDS + START_S)) id healthy
  while :; do
    healthy=0
    for id in $(containers "$service"); do
      [ "$(docker inspect --format '{{.State.Health.Status}}' "$id")" = healthy ] && healthy=$((healthy + 1))
    done
    [ "$healthy" -ge "$wanted" ] && return
    [ "$SECONDS" -lt "$end" ] || die "$service: $healthy of $wanted healthy after $START_S s"
    sleep 1
  done
}

# What a container may and may not: told by itself.
check_confined() {
  local service=$1 file=$SCRATCH/confined
  docker exec "$2" cat /proc/1/status /proc/1/limits /proc/mounts >"$file"
  grep -q '^Uid:[[:space:]]*10001' "$file" || die "$service runs as another user"
  grep -q '^CapEff:[[:space:]]*0*$' "$file" || die "$service has capabilities"
  grep -q '^Seccomp:[[:space:]]*2$' "$file" || die "$service runs without a seccomp profile"
  grep -q '^NoNewPrivs:[[:space:]]*1$' "$file" || die "$service may gain privileges"
  grep -q "^Max locked memory *$LOCKED *$LOCKED " "$file" || die "$service may lock another amount of memory"
  grep -q '^[^ ]* / [^ ]* ro,' "$file" || die "$service can write to its root"
}

metric() {
  docker exec "$(containers "$1")" python3 -c \
    "import urllib.request as u; print(u.urlopen('http://127.0.0.1:$2/metrics').read().decode())"
}

# Prints the text of an answer; fails where there is none, and leaves in a file what came instead.
ask() {
  local body=$SCRATCH/answer status
  status=$(curl --silent --output "$body" --write-out '%{http_code}' --max-time 120 "$URL/v1/completions" \
    --header 'Content-Type: application/json' \
    --data '{"model": "'"$MODEL"'", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}') || true
  [ "$status" = 200 ] || return 1
  python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])' <"$body"
}

# The process ends, and with it its container, which the engine starts again: to it, it was no wish of ours.
kill_inside() {
  say "killing $1"
  docker exec "$2" sh -c 'kill -KILL -1' || true
}

# A request may be refused while what it needs starts again: then it is asked again. An answer must be the right one.
ask_again() {
  local end=$((SECONDS + START_S)) refused=0 answer
  until answer=$(ask); do
    refused=$((refused + 1))
    [ "$SECONDS" -lt "$end" ] || die "no answer for $START_S s after $1: $(cat "$SCRATCH/answer" 2>/dev/null)"
    sleep 1
  done
  [ "$answer" = "$EXPECTED" ] || die "another answer after $1: $answer"
  say "the same answer after $1, refused $refused times before"
}

# A process may be healthy and yet not help.
wait_helpers() {
  local end=$((SECONDS + START_S)) helpers
  until helpers=$(metric gpu_worker 9402 | sed -n 's/^h3_offload_workers\({.*}\)\? \([0-9]*\)\(\.0\)\?$/\2/p') &&
    [ "$helpers" = "$OFFLOAD_WORKERS" ]; do
    [ "$SECONDS" -lt "$end" ] || die "${helpers:-0} of $OFFLOAD_WORKERS processes of ann_offload help $1"
    sleep 1
  done
  say "$OFFLOAD_WORKERS processes of ann_offload help $1"
}

trap finish EXIT
fetch "$BASE" || make_base
fetch "$REDIS" || make_redis
write_layer
serve_packages
for service in "${SERVICES[@]}"; do
  say "image of $service"
  "${COMPOSE[@]}" build "$service" >"$SCRATCH/image.log" 2>&1 || { tail --lines=40 "$SCRATCH/image.log" >&2; die "no image of $service"; }
done
for service in "${LIGHT[@]}"; do
  docker run --rm --entrypoint python3 "h3/$service:0.1.0" -c \
    'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is not None)' || die "$service carries torch"
done
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E "^(h3/|$BASE)" | sort

say 'starting the node'
"${COMPOSE[@]}" up --detach --no-build --scale "ann_offload=$OFFLOAD_WORKERS" "${SERVICES[@]}" redis
for service in "${SERVICES[@]}" redis; do
  wait_healthy "$service" "$([ "$service" = ann_offload ] && echo "$OFFLOAD_WORKERS" || echo 1)"
  say "$service is healthy"
done
for service in "${SERVICES[@]}"; do
  for id in $(containers "$service"); do check_confined "$service" "$id"; done
done
say 'no process has root, capabilities, or a root file system that it can write to'

MODEL=$(curl --silent --fail "$URL/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
EXPECTED=$(ask) || die "no answer: $(cat "$SCRATCH/answer" 2>/dev/null)"
say "answer: $EXPECTED"
BACKEND=$(metric nvme_io 9403 | sed -n 's/^h3_io_backend{.*backend="\([a-z_]*\)".*} 1\(\.0\)\?$/\1/p')
say "the cold store is read by ${BACKEND:-nothing}"
[ "$BACKEND" = io_uring ] || die 'the seccomp profile, or the kernel, keeps io_uring away'
wait_helpers 'at first'

kill_inside 'one ann_offload' "$(containers ann_offload | head --lines=1)"
ask_again 'the end of one ann_offload'
wait_helpers 'after the end of one'
for service in migration_controller nvme_io gpu_worker gateway; do
  kill_inside "$service" "$(containers "$service")"
  ask_again "the end of $service"
  wait_healthy "$service" 1
  wait_helpers "after the end of $service"
done
for service in "${SERVICES[@]}" redis; do
  wait_healthy "$service" "$([ "$service" = ann_offload ] && echo "$OFFLOAD_WORKERS" || echo 1)"
done
ask_again 'all of them'

if [ "${1:-}" = --clean ]; then
  "${COMPOSE[@]}" down --volumes --timeout 40 >/dev/null 2>&1
  printf 'h3/%s:0.1.0\n' "${SERVICES[@]}" | xargs docker rmi >/dev/null 2>&1 || true
fi
