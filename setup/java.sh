#!/bin/sh
# Check that Java 17 or newer is there, as Spark will find it; install it where apt may.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

java_major() {
    "${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1
}

enough() {
    major=$(java_major)
    [ -n "$major" ] && [ "$major" -ge 17 ]
}

enough && exit 0
if [ -n "${JAVA_HOME:-}" ]; then
    echo >&2 "Spark needs Java 17 or newer, and JAVA_HOME ($JAVA_HOME) has ${major:-none}. Point it at a newer one, or: unset JAVA_HOME"
    exit 1
fi
install_packages "Spark needs Java 17 or newer" 'openjdk-17-jre-headless|openjdk-21-jre-headless'
enough && exit 0
echo >&2 "Java ${major:-(none)} is still what 'java' starts; Spark needs 17 or newer. See: update-alternatives --config java"
exit 1
