"""What every app is as a process: its surroundings, its logging, and what its exit code says."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, Retry
from airflow_provider_pgrepl.replication.config import Pipeline

DONE = 0
RETRY_MAY_HELP = 75
WILL_NOT_HELP = 78
CRASHED = 70
"""An error that is nobody's but ours: a bug. A retry may get past it."""

DSN_VARIABLE = "PGREPL_DSN"
STATE_DSN_VARIABLE = "PGREPL_STATE_DSN"

log = logging.getLogger("airflow_provider_pgrepl")

Work = Callable[[Pipeline, argparse.Namespace], int]


def source_dsn() -> str:
    """The source's DSN. Raises ConfigError."""
    dsn = os.environ.get(DSN_VARIABLE, "").strip()
    if not dsn:
        raise ConfigError(
            f"{DSN_VARIABLE} is not set", "put the source's connection string there; it is never an argument"
        )
    return dsn


def state_dsn() -> str:
    """The DSN of the database that holds the `_pgrepl` schema: the source, unless told otherwise."""
    return os.environ.get(STATE_DSN_VARIABLE, "").strip() or source_dsn()


def run(
    program: str, argv: Sequence[str], make: Callable[[argparse.ArgumentParser], None], work: Work
) -> int:
    """Parse arguments, run, and turn whatever happens into an exit code and a readable last line."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--pipeline", required=True, metavar="FILE.json", help="the pipeline file")
    make(parser)
    arguments = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        return work(Pipeline.read(arguments.pipeline), arguments)
    except PgReplError as error:
        log.error("%s: %s", error.__class__.__name__, error)
        return exit_code(error)
    except Exception:
        log.exception("%s ended by an error of its own", program)
        return CRASHED


def exit_code(error: PgReplError) -> int:
    return RETRY_MAY_HELP if error.retry is Retry.TIMED else WILL_NOT_HELP


class StopSignal:
    """SIGTERM, SIGINT, or the end of the parent process (as when spark-submit is killed): time to end."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._parent = os.getppid()

    def install(self) -> None:
        """To be called again after a Spark session was made, which takes SIGINT for itself."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._asked.set())

    def wait(self, seconds: float) -> bool:
        """Wait a while; whether it is time to end."""
        return self._asked.wait(seconds) or self.is_set

    @property
    def is_set(self) -> bool:
        return self._asked.is_set() or os.getppid() != self._parent
