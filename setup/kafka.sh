#!/bin/sh
# Kafka's broker in .kafka, for the tests of publishing to it, once; those tests are skipped without. Usage: kafka.sh [FOLDER, .kafka by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.kafka}")
cd "$(dirname "$0")/.."
. setup/apt.sh

sums=$(realpath setup/kafka.sha256)
complete() {
    (cd "$target" 2>/dev/null && sha256sum --check --status "$sums" 2>/dev/null)
}

complete && exit 0
mvn --version >/dev/null 2>&1 || install_packages "Maven is missing; it fetches Kafka" maven

# A local repository of its own: a half-filled ~/.m2 makes Maven fail in odd ways.
repository=$(mktemp -d)
trap 'rm -rf "$repository"' EXIT
echo "fetching Kafka"
mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never --file setup/kafka.xml -Dmaven.repo.local="$repository" \
    -DoutputDirectory="$target" dependency:copy-dependencies
if ! complete; then
    echo >&2 "The jars in $target are not those of setup/kafka.sha256; delete the folder and try again."
    exit 1
fi
