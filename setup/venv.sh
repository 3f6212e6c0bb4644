#!/bin/sh
# Make .venv as uv.lock says. uv itself comes from PyPI, into .uv, when it is not on PATH.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh
UV_VERSION=0.13.8 # as in the Dockerfile
unset VIRTUAL_ENV UV_PROJECT_ENVIRONMENT
. setup/uv.sh

if ! "$uv" --version >/dev/null 2>&1; then
    command -v python3 >/dev/null 2>&1 || install_packages "Python 3.11 or newer is missing" python3 python3-venv
    # Debian ships venv without the part that installs pip unless this package is there.
    python3 -c 'import ensurepip' 2>/dev/null || install_packages "Python's venv module is missing" python3-venv
    rm -rf .uv
    python3 -m venv .uv
    .uv/bin/pip install --quiet "uv==$UV_VERSION"
fi
# A distribution compiles its Python with the optimizations that `pyenv install` leaves out: unit tests take an eighth
# less CPU time. One that pyproject.toml does not allow is left out.
system=/usr/bin/python3
if [ -z "${UV_PYTHON:-}" ] && "$system" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
    export UV_PYTHON="$system"
fi
exec "$uv" sync --frozen --quiet
