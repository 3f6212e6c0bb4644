# Sourced by scripts that are in the root of the project: sets `uv` to the program with which setup/venv.sh
# made .venv.
if command -v uv >/dev/null; then uv=uv; else uv="$(pwd)/.uv/bin/uv"; fi
