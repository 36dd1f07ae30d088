#!/usr/bin/env bash
# Runs the fuzz targets on scratch copies of their corpus, one after the other:
#   tests/fuzz/run.sh [SECONDS]   for each target; default 20
# Build them before: cmake --preset fuzz && cmake --build --preset fuzz. Exits non-zero where one found something; the input and
# the log lie in build/fuzz/findings. To see it again: build/fuzz/bin/TARGET INPUT.
set -euo pipefail
cd "$(dirname "$0")/../.."
seconds=${1:-20}
bin=build/fuzz/bin
findings=build/fuzz/findings
for kind in safetensors adapter request; do
  [ -x "$bin/${kind}_fuzz" ] || { echo "run.sh: $bin/${kind}_fuzz is not built" >&2; exit 2; }
done
mkdir -p "$findings"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# number NAME LOG: one of libFuzzer's final numbers.
number() { sed -n "s/^stat::$1: *//p" "$2"; }

export UBSAN_OPTIONS=print_stacktrace=1
failed=0
for kind in safetensors adapter request; do
  dictionary=tests/fuzz/adapter.dict
  [ "$kind" != request ] || dictionary=tests/fuzz/request.dict
  log=$scratch/$kind.log
  cp -r "tests/fuzz/corpus/$kind" "$scratch/$kind"
  # What was found once and is mended: run first, every time.
  [ ! -d "tests/fuzz/regressions/$kind" ] || cp "tests/fuzz/regressions/$kind"/* "$scratch/$kind/"
  if "$bin/${kind}_fuzz" -max_total_time="$seconds" -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 -dict="$dictionary" \
    -artifact_prefix="$findings/$kind-" "$scratch/$kind" >"$log" 2>&1; then
    verdict=""
  else
    failed=1
    verdict=", FINDING: see $findings/$kind.log"
    cp "$log" "$findings/$kind.log"
  fi
  coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
  echo "$kind: $(number number_of_executed_units "$log") executions, coverage ${coverage:-unknown}," \
    "$(number new_units_added "$log") new units$verdict"
done
exit "$failed"
