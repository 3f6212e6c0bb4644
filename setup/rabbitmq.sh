#!/bin/sh
# Debian's RabbitMQ, for the tests of publishing and `make demo EVENTS=rabbitmq`; those tests are skipped without.
# The package's own service is not needed: tests run private nodes, without privileges.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh

for script in /usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server; do
    if [ -x "$script" ]; then exit 0; fi
done
install_packages "Tests of publishing need RabbitMQ" rabbitmq-server
