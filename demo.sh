#!/usr/bin/env bash
# Sets up a fresh Debian 12 machine, builds, and shows what H3 Serve does: one resident model, two stacked adapters at strengths
# that change from request to request, and where every byte of memory is. Ends by itself and leaves no process behind.
set -euo pipefail
cd "$(dirname "$0")"

say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }
note() { printf '    %s\n' "$*"; }

say "Setting up (quick when it was done before)"
scripts/setup.sh
say "Building h3-scheduler, h3-worker and h3ctl"
scripts/build.sh release h3-scheduler h3-worker h3ctl

bin=build/release/bin
work=out/demo
mkdir -p "$work"
if [ ! -f "$work/request.safetensors" ] || [ scripts/make_checkpoint.py -nt "$work/request.safetensors" ]; then
  say "Making a small H3 checkpoint of the true format, with random weights, and two adapters for it"
  .deps/venv/bin/python scripts/make_checkpoint.py demo "$work"
fi

log=$work/server.log
ready=$work/ready
: >"$log"
: >"$ready"
"$bin/h3-scheduler" --model "$work/h3-small.safetensors" --adapters "$work/adapters" --listen 127.0.0.1:0 --metrics 127.0.0.1:0 \
  >"$ready" 2>"$log" &
server=$!
stop() {
  kill -TERM "$server" 2>/dev/null || true
  wait "$server" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 130' INT TERM
for _ in $(seq 300); do
  grep -q '^ready ' "$ready" && break
  if ! kill -0 "$server" 2>/dev/null; then
    cat "$log" >&2
    exit 1
  fi
  sleep 0.1
done
address=$(sed -n 's/^ready grpc=\([^ ]*\).*/\1/p' "$ready")
metrics=$(sed -n 's/^ready .*metrics=\(.*\)/\1/p' "$ready")
export H3_SERVER=$address
say "h3-scheduler and its h3-worker serve at $address (metrics at http://$metrics/metrics)"
"$bin/h3ctl" model

"$bin/h3ctl" --json memory >"$work/before.json"

# generate NAME ADAPTERS...: on a terminal with a progress bar, else with the last lines of the events.
generate() {
  local name=$1
  shift
  local options=()
  for adapter in "$@"; do options+=(--lora "$adapter"); done
  if [ -t 1 ]; then
    "$bin/h3ctl" generate --request "$work/request.safetensors" "${options[@]}" --evaluations 4 --seed 7 --output "$work/$name.safetensors"
  else
    "$bin/h3ctl" generate --request "$work/request.safetensors" "${options[@]}" --evaluations 4 --seed 7 --output "$work/$name.safetensors" |
      grep -v '"event":"accepted"' | cut -c1-160
  fi
}

say "A generation with two stacked adapters: turbo at 1.0, style at 0.6"
generate first turbo=1.0 style=0.6 &
generation=$!
# The fullest moment of the run.
while kill -0 "$generation" 2>/dev/null; do
  "$bin/h3ctl" --json memory
  sleep 0.1
done >"$work/during.json"
wait "$generation"

say "The same with one strength changed: nothing is loaded, nothing is merged, nothing is copied"
generate strength turbo=1.0 style=0.25
say "And with the stack reversed"
generate reversed style=0.6 turbo=1.0

"$bin/h3ctl" --json memory >"$work/after.json"

say "Who owned the memory: base_weights never change, adapters add their own bytes and nothing else, activations come and go"
.deps/venv/bin/python - "$work" <<'PYTHON'
import json
import sys

before, during, after = ([json.loads(line)["devices"][0] for line in open(f"{sys.argv[1]}/{name}.json")] for name in ("before", "during", "after"))
columns = [before[0], max(during, key=lambda it: it["used_bytes"]), after[0]]
print(f"    {'bytes':14s}{'before':>16s}{'during':>16s}{'after':>16s}")
for owner in columns[0]["owners"]:
    values = [column["owners"][owner] for column in columns]
    if any(values):
        print(f"    {owner:14s}" + "".join(f"{value:16,d}" for value in values))
print(f"    {'= used':14s}" + "".join(f"{column['used_bytes']:16,d}" for column in columns))
for adapter in columns[2]["adapters"]:
    print(f"    of the adapters: {adapter['name']} {adapter['bytes']:,d}")
print(f"    merged copies for this stack would have held {columns[1]['avoided_resident_bytes']:,d} more")
same = columns[0]["base_fingerprint"] == columns[2]["base_fingerprint"] and columns[2]["base_mutations"] == 0
print(f"    the base has its fingerprint of before: {same}")
sys.exit(not same)
PYTHON

say "How much the answers differ (relative L2 of the video latents)"
.deps/venv/bin/python - "$work" <<'PYTHON'
import sys
from safetensors.numpy import load_file
import numpy as np

first, strength, reversed_ = (load_file(f"{sys.argv[1]}/{name}.safetensors")["video_latents"] for name in ("first", "strength", "reversed"))
for name, other in (("one strength changed", strength), ("stack reversed", reversed_)):
    print(f"    {name:22s} {np.linalg.norm(other - first) / np.linalg.norm(first):.2e}")
PYTHON

say "Done. The latents:"
for name in first strength reversed; do note "$PWD/$work/$name.safetensors"; done
note "the server's log: $PWD/$log"
