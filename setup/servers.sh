#!/bin/sh
# Debian's RabbitMQ, NATS, Prometheus and PostgreSQL for the tests, installed where apt may. Fails if one is missing; tests that need it are skipped then.
set -u
cd "$(dirname "$0")/.."
missing=0
for server in postgresql rabbitmq nats prometheus; do
    sh "setup/$server.sh" || missing=1
done
exit $missing
