#!/bin/sh
# Debian's NATS, for the tests of publishing on creek's wire; those tests are skipped without.
# The package's own service is not needed: tests run private servers, without privileges.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

if [ -x /usr/sbin/nats-server ] || command -v nats-server >/dev/null; then exit 0; fi
install_packages "Tests of publishing need NATS" nats-server
