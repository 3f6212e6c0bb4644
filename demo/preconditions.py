"""The checks before the demo starts anything. Each failed check has its own message."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.spark.connectors import JARS_VARIABLE, delta_jars
from airflow_provider_pgrepl.replication.spark.session import check_java
from demo import kafka, nats, rabbitmq, s3_lake
from demo.errors import DemoError
from demo.folder import ROOT
from demo.options import Options

NEEDED_GIB = 3


def check(options: Options, folder: Path) -> None:
    """Raise DemoError for the first requirement that is not met."""
    if sys.platform != "linux":
        raise DemoError("The demo needs Linux: it finds its processes by /proc.")
    _check_disk(folder)
    check_port("PostgreSQL", options.pg_port, "PG_PORT")
    if options.events == "rabbitmq" and rabbitmq.programs() is None:
        raise DemoError("EVENTS=rabbitmq needs RabbitMQ: sh setup/rabbitmq.sh")
    if options.events == "nats" and nats.program() is None:
        raise DemoError("EVENTS=nats needs NATS: sh setup/nats.sh")
    if options.events == "kafka" and not kafka.is_there():
        raise DemoError("EVENTS=kafka needs Kafka: sh setup/kafka.sh")
    if options.lake == "s3" and not s3_lake.is_there():
        raise DemoError("LAKE=s3 needs versitygw: sh setup/versitygw.sh")
    check_port("Airflow", options.airflow_port, "AIRFLOW_PORT")
    os.environ[JARS_VARIABLE] = str(ROOT / ".jars")
    try:
        check_java()
        delta_jars()
    except ToolError as error:
        raise DemoError(str(error)) from None


def check_port(whose: str, port: int, option: str) -> None:
    """Raise DemoError if this port of 127.0.0.1 is in use."""
    with socket.socket() as probe:
        # The port of a demo that has just ended is free, although its last connections are in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise DemoError(
                f"Port {port}, meant for {whose}, is in use. Choose another: make demo {option}={port + 1}"
            ) from None


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free / 2**30
    if free < NEEDED_GIB:
        raise DemoError(f"The demo needs {NEEDED_GIB} GiB of disk for {folder}, and {free:.1f} GiB are free.")
