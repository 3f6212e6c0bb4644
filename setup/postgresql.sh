#!/bin/sh
# Debian's PostgreSQL with contrib and PostGIS, for the tests of the types of extensions; they are skipped without.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

for control in /usr/share/postgresql/*/extension/postgis.control; do
    folder=$(dirname "$control")
    major=$(basename "$(dirname "$folder")")
    if [ -e "$control" ] && [ -e "$folder/hstore.control" ] && [ -x "/usr/lib/postgresql/$major/bin/initdb" ]; then
        exit 0
    fi
done
install_packages "Tests of extensions' types need PostgreSQL with PostGIS" \
    'postgresql-15|postgresql-17|postgresql-16' 'postgresql-15-postgis-3|postgresql-17-postgis-3|postgresql-16-postgis-3'
