#!/usr/bin/env bash
# Configures and builds a preset: scripts/build.sh [release|debug|asan|tsan] [target ...]
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
shift || true
options=()
[ -z "${H3_LIBTORCH:-}" ] || options+=("-DCMAKE_PREFIX_PATH=$H3_LIBTORCH")
cmake --preset "$preset" "${options[@]}" >/dev/null
cmake --build "build/$preset" ${1:+--target "$@"}
