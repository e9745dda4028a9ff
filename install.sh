#!/usr/bin/env bash
# Sets Tandem up in .venv beside this file, the first time and when the requirements change, and starts it.
#
#   ./install.sh                      the web app
#   ./install.sh generate "PROMPT"    any sub-command of app.py, with any arguments
#   ./install.sh test [PYTEST ARGS]   the default tests, and first the tools that they need
#   ./install.sh test --all           all tests: slow ones, in a browser and on a GPU too
#
# All this script does is find a Python from 3.10 to 3.13; tools/setup_env.py does the rest.
# TANDEM_PYTHON names the Python to use. Nothing outside this folder is changed.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started as `sh install.sh`
set -u

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do
  link=$(readlink -- "$script")
  case $link in
    /*) script=$link ;;
    *) script=$(dirname -- "$script")/$link ;;
  esac
done
root=$(CDPATH='' cd -P -- "$(dirname -- "$script")" && pwd) || exit 2

# Variables of another Python would change which Python runs, also an isolated one; these are left alone.
for name in "${!PYTHON@}"; do
  case $name in
    PYTHONDONTWRITEBYTECODE | PYTHONUNBUFFERED | PYTHONPYCACHEPREFIX | PYTHONFAULTHANDLER | PYTHONNOUSERSITE) ;;
    *) unset "$name" ;;
  esac
done

say() { printf 'Tandem setup: %s\n' "$1" >&2; }

# Print "ok" for a suitable Python $1, or its version and what it lacks. Fails if it does not run, such as a
# pyenv shim of an inactive version.
probe() {
  "$1" -I -c '
import sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(print(version))
if sys.maxsize < 2**32:
    sys.exit(print(version, "for 32 bits"))
try:
    import ensurepip, venv
except ImportError:
    sys.exit(print(version, "without its venv module"))
print("ok")' </dev/null 2>/dev/null
}

python='' rejected=''
consider() {
  local answer
  answer=$(probe "$1") || return 0
  case $answer in
    ok) python=$1 ;;
    ?*) rejected="$rejected${rejected:+, }$1 ($answer)" ;;
  esac
}

if [ -n "${TANDEM_PYTHON:-}" ]; then
  consider "$TANDEM_PYTHON"
  if [ -z "$python" ]; then
    say "TANDEM_PYTHON is not a working Python 3.10 to 3.13 with the venv module: ${rejected:-$TANDEM_PYTHON}"
    say "set it to one, or unset it to search for one"
    exit 2
  fi
else
  unset TANDEM_PYTHON
  consider "$root/.venv/bin/python"
  rejected=''
  for name in python3.11 python3.12 python3.13 python3.10 python3 python; do
    [ -z "$python" ] || break
    while IFS= read -r path; do
      [ -z "$path" ] || consider "$path"
      [ -z "$python" ] || break
    done <<PATHS
$(type -aP "$name")
PATHS
  done
fi

if [ -z "$python" ]; then
  say "no Python 3.10 to 3.13 with its venv module was found; found: ${rejected:-none}"
  case $rejected in
    *'without its venv module'*) say "install it (Debian and Ubuntu: the package python3-venv) and run the same command again" ;;
    *) say "install Python 3.11 (from your system's packages or https://www.python.org/downloads/), or set TANDEM_PYTHON to one, and run the same command again" ;;
  esac
  exit 2
fi

# How messages name this script, so that their commands can be pasted.
case $0 in
  */*) TANDEM_PROGRAM=$(printf %q "$0") ;;
  *) TANDEM_PROGRAM="bash $(printf %q "$0")" ;;
esac
export TANDEM_PROGRAM

exec "$python" -I -S "$root/tools/setup_env.py" "$@"
