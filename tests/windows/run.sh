#!/usr/bin/env bash
# Runs install.bat and Tandem on a Windows Python under Wine, and prints a table of what was checked.
#
#   tests/windows/run.sh                    the tests of this folder
#   tests/windows/run.sh tests/core         other tests, with any arguments of pytest
#
# Needs Debian, root for installing Wine, ./install.sh's .venv, and about 5 GB of disk. Packages come from Debian and from
# the index that pip is configured for. The first run prepares a Wine prefix, which takes about 10 minutes; it is kept in
# TANDEM_WINE (default: ~/.cache/tandem-wine). On Windows itself: .venv\Scripts\python -m pytest tests\windows
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."

if ! command -v wine >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo 'Wine is not installed, and only root can install it on Debian' >&2
    echo 'run as root: apt-get install --no-install-recommends wine wine64' >&2
    exit 2
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends wine wine64 >/dev/null
fi
exec .venv/bin/python -m tests.windows "${TANDEM_WINE:-$HOME/.cache/tandem-wine}" "$@"
