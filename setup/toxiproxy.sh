#!/bin/sh
# Toxiproxy, a proxy with faults of a network, in .toxiproxy, built once; the tests of networks are skipped without. Usage: toxiproxy.sh [FOLDER, .toxiproxy by default]
set -eu
version=v2.12.0
here=$(dirname "$0")
exec sh "$here/go_program.sh" "${1:-$here/../.toxiproxy}" toxiproxy "github.com/Shopify/toxiproxy/v2/cmd/server@$version"
