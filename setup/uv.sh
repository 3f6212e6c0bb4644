# Sourced in the root of the project: sets `uv` to the one on PATH, or else to the one that setup/venv.sh fetches.
if uv --version >/dev/null 2>&1; then uv=uv; else uv="$(pwd)/.uv/bin/uv"; fi
# The machine's own certificates, where it has them: a company's proxy is known to these alone.
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
    export UV_SYSTEM_CERTS=true UV_NATIVE_TLS=true
fi
