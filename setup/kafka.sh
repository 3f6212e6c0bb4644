#!/bin/sh
# Kafka's broker in .kafka, for the tests of publishing to it, once; those tests are skipped without. Usage: kafka.sh [FOLDER, .kafka by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.kafka}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars kafka Kafka "$target"
