"""The command-line options of the demo."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".demo"


@dataclass(frozen=True)
class Options:
    """Validated options. `read_options` has their help texts."""

    exit_when_done: bool
    events: str
    lake: str
    rate: int
    clients: int
    scale: int
    duration_s: int
    pg_port: int
    airflow_port: int
    folder: Path


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. For an invalid one, argparse prints the usage and ends the process."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="PostgreSQL to the lake, live.")
    parser.add_argument(
        "--exit", action="store_true", help="end everything after the comparison, instead of staying up"
    )
    parser.add_argument(
        "--rate", type=_positive, default=200, help="transactions per second of the traffic (200)"
    )
    parser.add_argument(
        "--events",
        choices=("", "rabbitmq", "nats", "kafka"),
        default="",
        help="publish the changes there too",
    )
    parser.add_argument(
        "--lake",
        choices=("", "s3"),
        default="",
        help="where the lake is: in a folder, or in S3",
    )
    parser.add_argument("--clients", type=_positive, default=4, help="connections of the traffic (4)")
    parser.add_argument(
        "--scale", type=_positive, default=10, help="pgbench scale: times 100,000 accounts (10)"
    )
    parser.add_argument(
        "--duration", type=_positive, default=60, help="seconds of traffic once replication runs (60)"
    )
    parser.add_argument("--pg-port", type=_port, default=15432, help="port of PostgreSQL (15432)")
    parser.add_argument("--airflow-port", type=_port, default=8180, help="port of Airflow (8180)")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where everything lies (.demo)")
    chosen = parser.parse_args(arguments)
    return Options(
        exit_when_done=chosen.exit,
        events=chosen.events,
        lake=chosen.lake,
        rate=chosen.rate,
        clients=chosen.clients,
        scale=chosen.scale,
        duration_s=chosen.duration,
        pg_port=chosen.pg_port,
        airflow_port=chosen.airflow_port,
        folder=chosen.folder.absolute(),
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 1024 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1024 to 65535")
    return number
