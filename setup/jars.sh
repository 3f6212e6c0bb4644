#!/bin/sh
# Fetch the jars that Delta needs beside what pyspark brings, once. Usage: jars.sh [FOLDER, .jars by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.jars}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars delta-jars "the Delta jars" "$target" copy
