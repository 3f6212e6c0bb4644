#!/bin/sh
# Hadoop's connector to stores that speak S3 in .jars/s3a, for Spark's readers of lakes there, once. Usage: s3a.sh [FOLDER, .jars/s3a by default]
set -eu
target=$(realpath -m "${1:-$(dirname "$0")/../.jars/s3a}")
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
fetch_jars s3a "Spark's connector to S3" "$target"
