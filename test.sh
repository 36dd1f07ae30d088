#!/usr/bin/env bash
# Sets up a fresh Debian 12 machine, builds, and runs every test. Again and again, from any folder.
#   ./test.sh                 everything
#   ./test.sh --asan          the C++ tests under the address and undefined-behaviour sanitizers
#   ./test.sh --tsan          the C++ tests that link neither LibTorch nor gRPC, under the thread sanitizer
#   ./test.sh -- PYTEST_ARGS  only the integration tests, with these arguments
set -euo pipefail
cd "$(dirname "$0")"
say() { printf '\n\033[1m==> %s\033[0m\n' "$*"; }

mode=all
pytest_args=(-q)
while [ $# -gt 0 ]; do
  case "$1" in
    --asan | --tsan) mode=${1#--} ;;
    --)
      mode=integration
      shift
      pytest_args=("$@")
      set --
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

# check NAME COMMAND...: runs on after a failure, so that one run shows all of them.
summary=()
failed=0
check() {
  local name=$1 begin=$SECONDS verdict=passed
  shift
  say "$name"
  "$@" || { verdict=FAILED; failed=1; }
  summary+=("$(printf '%-8s %4d s  %s' "$verdict" $((SECONDS - begin)) "$name")")
}

scripts/setup.sh --tests
case "$mode" in
  all | integration) presets=(release) ;;
  asan | tsan) presets=("$mode") ;;
esac
builds=("${presets[@]}")
if [ "$mode" = all ]; then
  presets+=(tsan)
  builds+=(tsan fuzz)
fi
for preset in "${builds[@]}"; do
  targets=()
  [ "$preset" != tsan ] || targets=(h3_tsan_tests)
  [ "$preset" != fuzz ] || targets=(h3_fuzz_targets)
  [ "$mode" != integration ] || targets=(h3-scheduler h3-worker h3ctl)
  say "Building ($preset)"
  scripts/build.sh "$preset" "${targets[@]}"
done

[ "$mode" != all ] || check "Protocol: buf lint" .deps/venv/bin/buf lint proto
if [ "$mode" != integration ]; then
  for preset in "${presets[@]}"; do check "C++ tests ($preset)" ctest --preset "$preset" -j "$(nproc)"; done
fi
[ "$mode" != all ] || check "Fuzz targets, 10 s each" tests/fuzz/run.sh 10
if [ "$mode" = all ] || [ "$mode" = integration ]; then
  check "Integration tests: the real programs over real gRPC" \
    env H3_BIN=build/release/bin .deps/venv/bin/python -m pytest tests/integration "${pytest_args[@]}"
fi

say "Summary, after $SECONDS s in all"
printf '    %s\n' "${summary[@]}"
exit "$failed"
