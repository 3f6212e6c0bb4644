#!/bin/sh
# Compare the locked dependencies with the vulnerabilities that osv.dev knows.
set -eu
cd "$(dirname "$0")/.."
. setup/uv.sh
exec "$uv" audit --preview-features audit-command --frozen --no-dev
