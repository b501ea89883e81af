#!/usr/bin/env bash
# Print the first interpreter that can run Flotilla and create virtual environments.
# PYTHON=... names one explicitly. Ray and torch publish wheels for CPython 3.11 to 3.14.
set -euo pipefail

usable() {
    "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, sys, venv
raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PY
}

# Whole, for its path may have spaces.
if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- python3 python3.13 python3.12 python3.11 python3.14
fi
for candidate in "$@"; do
    if usable "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done

if [ -n "${PYTHON:-}" ]; then
    looked_at="PYTHON=$PYTHON"
else
    looked_at="python3 and python3.11 to python3.14 on the PATH"
fi
cat >&2 <<MESSAGE
Flotilla needs CPython 3.11, 3.12, 3.13 or 3.14 with the venv module, and found none ($looked_at).
  Debian, Ubuntu:  sudo apt-get install python3 python3-venv
  macOS:           brew install python@3.12
  anywhere:        make install PYTHON=/path/to/python3.12
MESSAGE
exit 1
