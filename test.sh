#!/usr/bin/env bash
# Sets up a fresh Debian 12 machine, builds, and runs every test. Again and again, from any folder.
#   ./test.sh                 everything
#   ./test.sh --asan          the C++ tests under the address and undefined-behaviour sanitizers
#   ./test.sh -- PYTEST_ARGS  only the integration tests, with these arguments
set -euo pipefail
cd "$(dirname "$0")"
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
start=$SECONDS

preset=release
pytest_args=()
only_pytest=no
while [ $# -gt 0 ]; do
  case "$1" in
    --asan) preset=asan ;;
    --)
      shift
      pytest_args=("$@")
      only_pytest=yes
      break
      ;;
    -h | --help)
      sed -n '2,6p' "$0" | cut -c3-
      exit 0
      ;;
    *)
      echo "test.sh: unknown option $1 (see --help)" >&2
      exit 2
      ;;
  esac
  shift
done

scripts/setup.sh --tests
say "Building ($preset)"
scripts/build.sh "$preset"
if [ "$only_pytest" = no ]; then
  say "Protocol: buf lint"
  .deps/venv/bin/buf lint proto
  say "C++ tests"
  ctest --preset "$preset" -j 2
fi
if [ "$preset" = release ]; then
  say "Thread sanitizer: what links neither LibTorch nor gRPC"
  if [ "$only_pytest" = no ]; then
    scripts/build.sh tsan h3_tsan_tests
    ctest --preset tsan -j 2
  fi
  say "Integration tests: the real programs over real gRPC"
  H3_BIN=build/release/bin .deps/venv/bin/python -m pytest tests/integration -q "${pytest_args[@]}"
fi
say "All tests passed in $((SECONDS - start)) s"
