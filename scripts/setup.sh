#!/usr/bin/env bash
# Brings a Debian 12 machine to where H3 Serve builds: Debian packages, and a project-local .deps/ folder with LibTorch (out of the
# PyPI wheel), google/rpc protos and the Python tools. Touches nothing of the machine's Python. Quick when there is nothing to do.
#
#   scripts/setup.sh           what a build and the demo need
#   scripts/setup.sh --tests   and what the tests need
#
# Your own LibTorch: set H3_LIBTORCH=/path/to/libtorch, here and for scripts/build.sh, and the wheel is not fetched.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=no
for argument in "$@"; do
  case "$argument" in
    --tests) tests=yes ;;
    -h | --help)
      sed -n '2,9p' "$0" | cut -c3-
      exit 0
      ;;
    *)
      echo "setup.sh: unknown option $argument (see --help)" >&2
      exit 2
      ;;
  esac
done

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

packages=$(grep -v '^#' scripts/packages.txt)
[ "$tests" = no ] || packages="$packages $(grep -v '^#' scripts/packages-test.txt)"
# shellcheck disable=SC2086  # One word a package.
missing=$({ dpkg-query -W -f='${db:Status-Status} ${Package}\n' $packages 2>/dev/null || true; } | awk '$1 == "installed" {print $2}' |
  sort -u | comm -13 - <(tr ' ' '\n' <<<"$packages" | sort -u))
if [ -n "$missing" ]; then
  say "Installing Debian packages: $(tr '\n' ' ' <<<"$missing")"
  root=""
  [ "$(id -u)" = 0 ] || root=sudo
  $root apt-get update -qq
  # shellcheck disable=SC2086
  $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
  # The Prometheus package starts a server of its own; the tests start theirs.
  if [ "$tests" = yes ] && command -v systemctl >/dev/null && systemctl is-active -q prometheus 2>/dev/null; then
    $root systemctl disable --now prometheus || true
  fi
fi

mkdir -p .deps
requirements=(-r scripts/requirements.txt)
[ -n "${H3_LIBTORCH:-}" ] || requirements+=(-r scripts/requirements-torch.txt)
[ "$tests" = no ] || requirements+=(-r scripts/requirements-test.txt)
stamp=.deps/stamp-$tests
wanted="$(cat scripts/requirements*.txt scripts/setup.sh | sha256sum) ${H3_LIBTORCH:-}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || [ ! -x .deps/venv/bin/python ]; then
  say "Setting up .deps/venv (the torch wheel, for its LibTorch, takes some minutes the first time)"
  # Always Debian's own Python: the machine may have others first on its PATH.
  [ -x .deps/venv/bin/python ] || /usr/bin/python3 -m venv .deps/venv
  .deps/venv/bin/pip install --quiet --disable-pip-version-check "${requirements[@]}"
  site=$(.deps/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  [ -n "${H3_LIBTORCH:-}" ] || ln -sfn "$(realpath --relative-to=.deps "$site/torch")" .deps/libtorch
  rm -rf .deps/googleapis
  mkdir -p .deps/googleapis/google/rpc
  cp "$site"/google/rpc/*.proto .deps/googleapis/google/rpc/
  # What serves the tests serves the build too.
  echo "$wanted" >.deps/stamp-no
  echo "$wanted" >"$stamp"
fi
