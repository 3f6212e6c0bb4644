# Sourced in the root of the project: sets `uv` to the one on PATH, or else to the one that setup/venv.sh fetches.
if uv --version >/dev/null 2>&1; then uv=uv; else uv="$(pwd)/.uv/bin/uv"; fi
