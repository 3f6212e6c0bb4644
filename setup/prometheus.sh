#!/bin/sh
# Debian's Prometheus with promtool, for the tests of metrics and alert rules; those tests are skipped without.
# The package's own service is not needed: tests run private servers, without privileges.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
install_packages "Tests of metrics need Prometheus" prometheus
