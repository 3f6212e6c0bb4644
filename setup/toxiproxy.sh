#!/bin/sh
# Toxiproxy, a proxy with faults of a network, in .toxiproxy, built from its Go module, once; the tests of networks are skipped without. Usage: toxiproxy.sh [FOLDER, .toxiproxy by default]
set -eu
version=v2.12.0
target=$(realpath -m "${1:-$(dirname "$0")/../.toxiproxy}")
cd "$(dirname "$0")/.."

if [ -x "$target/toxiproxy" ]; then exit 0; fi
echo "building toxiproxy $version into $target, once"
mkdir -p "$target"
building=$(mktemp -d "$target/XXXXXX")
trap 'rm -rf "$building"' EXIT
GOBIN="$building" sh setup/go.sh go install -p 2 "github.com/Shopify/toxiproxy/v2/cmd/server@$version"
mv "$building/server" "$target/toxiproxy"
