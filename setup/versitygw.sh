#!/bin/sh
# A server that speaks S3 in .versitygw, built from its Go module, once, for the tests and the demo on an object store; those tests are skipped without. Usage: versitygw.sh [FOLDER, .versitygw by default]
set -eu
version=v1.8.0
target=$(realpath -m "${1:-$(dirname "$0")/../.versitygw}")
cd "$(dirname "$0")/.."

if [ -x "$target/versitygw" ]; then exit 0; fi
echo "building versitygw $version into $target, once; this takes some minutes"
mkdir -p "$target"
building=$(mktemp -d "$target/XXXXXX")
trap 'rm -rf "$building"' EXIT
GOBIN="$building" sh setup/go.sh go install -p 2 "github.com/versity/versitygw/cmd/versitygw@$version"
mv "$building/versitygw" "$target/versitygw"
