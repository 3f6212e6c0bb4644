#!/bin/sh
# Debian's RabbitMQ, NATS and PostgreSQL for the tests, installed where apt may. Fails if one is missing; tests that need it are skipped then.
set -u
cd "$(dirname "$0")/.."
missing=0
for server in postgresql rabbitmq nats; do
    sh "setup/$server.sh" || missing=1
done
exit $missing
