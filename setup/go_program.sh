#!/bin/sh
# Build a program from its Go module into a folder, once. Usage: go_program.sh FOLDER NAME PACKAGE@VERSION
set -eu
target=$(realpath -m "$1")
name=$2
package=$3
cd "$(dirname "$0")/.."

if [ -x "$target/$name" ]; then exit 0; fi
echo "building $package into $target, once; this takes some minutes"
mkdir -p "$target"
building=$(mktemp -d "$target/XXXXXX")
trap 'rm -rf "$building"' EXIT
GOBIN="$building" sh setup/go.sh go install -p 2 "$package"
mv "$building"/* "$target/$name"
