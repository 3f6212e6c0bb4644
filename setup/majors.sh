#!/bin/sh
# PostgreSQL 14 to 17 for tests, each into a folder of its own below .postgresql; the tests' 18 comes from PyPI.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh
target=$PWD/.postgresql

complete() {
    for version in $(sed -n 's/.*<version>\([0-9]*\.[0-9]*\)\.0<.*/\1/p' setup/majors.xml); do
        [ -x "$target/$version/bin/postgres" ] || return 1
    done
}

complete && exit 0
mvn --version >/dev/null 2>&1 || install_packages "Maven is missing; it fetches PostgreSQL 14 to 17" maven
case $(uname -m) in
    aarch64 | arm64) platform=linux-arm64v8 ;;
    *) platform=linux-amd64 ;;
esac

# A local repository of its own: a half-filled ~/.m2 makes Maven fail in odd ways.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "fetching PostgreSQL 14 to 17"
mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never --file setup/majors.xml -Dplatform=$platform \
    -Dmaven.repo.local="$work/repository" -DoutputDirectory="$work/jars" dependency:copy
.venv/bin/python setup/unpack_majors.py "$work/jars" "$target"
