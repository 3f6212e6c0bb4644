#!/bin/sh
# Fetch the jars that Delta needs beside what pyspark brings, once. Usage: jars.sh [FOLDER, .jars by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.jars}")
cd "$(dirname "$0")/.."
. setup/apt.sh

complete() {
    (cd "$target" 2>/dev/null && sha256sum --check --status "$sums" 2>/dev/null)
}

sums=$(realpath setup/delta-jars.sha256)
complete && exit 0
mvn --version >/dev/null 2>&1 || install_packages "Maven is missing; it fetches the Delta jars" maven

# A local repository of its own: a half-filled ~/.m2 makes Maven and Spark's Ivy fail in odd ways.
repository=$(mktemp -d)
trap 'rm -rf "$repository"' EXIT
echo "fetching the Delta jars"
mvn --batch-mode --quiet -Dstyle.color=never --file setup/delta-jars.xml -Dmaven.repo.local="$repository" \
    -DoutputDirectory="$target" dependency:copy
if ! complete; then
    echo >&2 "The jars in $target are not those of setup/delta-jars.sha256; delete the folder and try again."
    exit 1
fi
