#!/bin/sh
# A server that speaks Google Cloud Storage in .gcs_server, built once, for the tests; they are skipped without. Usage: gcs_server.sh [FOLDER, .gcs_server by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.gcs_server}")
cd "$(dirname "$0")/.."

if [ "$target/gcs_server" -nt setup/gcs_server/main.go ]; then exit 0; fi
echo "building fake-gcs-server into $target, once; this takes some minutes"
mkdir -p "$target"
sh setup/go.sh go build -C setup/gcs_server -p 2 -o "$target/building" .
mv "$target/building" "$target/gcs_server"
