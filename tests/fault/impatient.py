"""Runs an app whose limits of time are seconds, so that a test sees within seconds what happens at them.

python impatient.py --pipeline FILE.json replicate|publish [...]
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.events.publish import publisher
from airflow_provider_pgrepl.replication.events.targets import jetstream, kafka, kafka_broker, rabbitmq

STOP_S = 5.0
LONGEST_PAUSE_S = 1.0
ANSWER_S = 10
CONNECT_S = 8.0
PING_S = 2
HEARTBEAT_S = 6


def publish_impatiently() -> None:
    publisher._LONGEST_PAUSE_S = LONGEST_PAUSE_S
    jetstream._PING_S = PING_S
    rabbitmq._HEARTBEAT_S = HEARTBEAT_S
    kafka._CONNECT_S = CONNECT_S
    kafka_broker._GIVEN |= {"message.timeout.ms": ANSWER_S * 1000, "socket.timeout.ms": ANSWER_S * 333}


def end_impatiently() -> None:
    process.StopSignal = partial(process.StopSignal, limit_s=STOP_S)  # type: ignore[assignment, misc]


if __name__ == "__main__":
    pipeline, app, *more = sys.argv[1:3], *sys.argv[3:]
    {"publish": publish_impatiently, "replicate": end_impatiently}[app]()
    sys.exit(import_module(f"airflow_provider_pgrepl.replication.app.{app}").main([*pipeline, *more]))
