#!/bin/sh
# Debian's Chromium, for the tests of the page in Airflow; those tests are skipped without.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

if command -v chromium >/dev/null; then exit 0; fi
install_packages "Tests of the page in Airflow need Chromium" chromium
