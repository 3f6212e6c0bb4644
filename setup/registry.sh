#!/bin/sh
# A schema registry in .registry, for the tests of Avro at Kafka, once; they are skipped without. Usage: registry.sh [FOLDER, .registry by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.registry}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars registry "a schema registry" "$target"
if [ ! -d "$target/app" ]; then
    unpacked=$(mktemp -d "$target/unpacked.XXXXXX")
    tar --extract --gzip --file "$target"/apicurio-registry-app-*-all.tar.gz --directory "$unpacked"
    mv "$unpacked" "$target/app"
fi
