#!/bin/sh
# A connector of Hadoop's to a store in .jars/NAME, for Spark's readers of lakes there, once. Usage: connector.sh s3a|gs|abfs [FOLDER]
set -eu
target=$(realpath -m "${2:-$(dirname "$0")/../.jars/$1}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars "$1" "Spark's connector to $1://" "$target"
