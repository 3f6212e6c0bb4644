#!/bin/sh
# Debezium's engine in .debezium, with which the tests compare its format, once; they are skipped without. Usage: debezium.sh [FOLDER, .debezium by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.debezium}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars debezium "Debezium's engine" "$target"
