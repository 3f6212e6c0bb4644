#!/bin/sh
# A server that speaks S3 in .versitygw, built from its Go module, once, for the tests and the demo on an object store; those tests are skipped without. Usage: versitygw.sh [FOLDER, .versitygw by default]
set -eu
version=v1.8.0
here=$(dirname "$0")
exec sh "$here/go_program.sh" "${1:-$here/../.versitygw}" versitygw "github.com/versity/versitygw/cmd/versitygw@$version"
