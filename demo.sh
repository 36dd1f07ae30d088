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

say "Memory before: the base weights, mapped and never copied"
"$bin/h3ctl" memory

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
during=""
while kill -0 "$generation" 2>/dev/null; do
  during=$("$bin/h3ctl" memory)
  # A run that computes holds megabytes of activations.
  ! grep -q '^  activations .* MiB' <<<"$during" || break
done
wait "$generation"
say "Memory during it: activations come and go, the adapters have come to stay"
echo "$during"

say "The same with one strength changed: nothing is loaded, nothing is merged, nothing is copied"
generate strength turbo=1.0 style=0.25
say "And with the stack reversed"
generate reversed style=0.6 turbo=1.0

say "Memory after: base_weights as before, only the adapters' own bytes were added"
"$bin/h3ctl" memory

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
