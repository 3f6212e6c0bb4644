"""The process of each app: environment variables, logging, signals and exit codes."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, Self

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, Retry
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime import process_io
from airflow_provider_pgrepl.replication.runtime.host import check_libraries
from airflow_provider_pgrepl.replication.runtime.terminal import log_handler
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.trace import log_unexpected

DONE = 0
RETRY_MAY_HELP = 75
WILL_NOT_HELP = 78
CRASHED = 70
"""The exit code for an unexpected error, which is a bug of this package. A retry may succeed."""

BUG = "which is a bug: run it again, and report the lines below if it fails again"
"""The clause after the name of a program that an unexpected exception has ended."""

DSN_VARIABLE = "PGREPL_DSN"
STATE_DSN_VARIABLE = "PGREPL_STATE_DSN"
PRIMARY_DSN_VARIABLE = "PGREPL_PRIMARY_DSN"
TARGET_VARIABLE = "PGREPL_TARGET_URI"
SALT_VARIABLE = "PGREPL_HASH_SALT"
REGISTRY_VARIABLE = "PGREPL_REGISTRY_URI"

log = logging.getLogger("airflow_provider_pgrepl")

_PARENT_INTERVAL_S = 1.0
_STOPPING = (signal.SIGTERM, signal.SIGINT)

Work = Callable[[Pipeline, argparse.Namespace], int]
STOP_LIMIT_S = 100.0
"""Seconds that an app may take to end when asked to. Airflow's operators wait longer (`stop_timeout_s`)."""
CAUGHT_UP = "caught-up"
MAINTENANCE_LIMIT_S = 600.0
"""Seconds that maintenance compacts files by default. A compaction that has begun is finished."""
VERIFY_TIMEOUT_S = 600.0
VALUES, TEXT = "values", "text"
"""What a verification compares."""
"""Seconds that a comparison waits by default until the changelog has reached the source's snapshot."""
AddArguments = Callable[[argparse.ArgumentParser], None]


def source_dsn() -> str:
    """Return the source's DSN. Raises ConfigError if PGREPL_DSN is not set."""
    dsn = os.environ.get(DSN_VARIABLE, "").strip()
    if not dsn:
        raise ConfigError(
            f"{DSN_VARIABLE} is not set", "set it to the source's connection string; it is never an argument"
        )
    return dsn


def state_dsn() -> str:
    """Return the DSN of the database with the `_pgrepl` schema: PGREPL_STATE_DSN, by default the source's."""
    return os.environ.get(STATE_DSN_VARIABLE, "").strip() or source_dsn()


def primary_dsn() -> str:
    """Return the DSN of the primary of a source that is a standby, "" if it is not given."""
    return os.environ.get(PRIMARY_DSN_VARIABLE, "").strip()


def target_uri() -> str:
    """Return the URI of a publisher's target. Raises ConfigError if PGREPL_TARGET_URI is not set."""
    uri = os.environ.get(TARGET_VARIABLE, "").strip()
    if not uri:
        raise ConfigError(
            f"{TARGET_VARIABLE} is not set",
            "set it to the broker's URI, as amqp://user:password@host:5672/%2F; it is never an argument",
        )
    return uri


def registry_uri() -> str:
    """Return the URI of a schema registry. Raises ConfigError if PGREPL_REGISTRY_URI is not set."""
    uri = os.environ.get(REGISTRY_VARIABLE, "").strip()
    if not uri:
        raise ConfigError(
            f"{REGISTRY_VARIABLE} is not set, and format avro needs a schema registry",
            "set it to the registry's URI, as https://user:password@host:8081; it is never an argument. In"
            " Airflow, set registry_conn_id to a connection",
        )
    return uri


def hash_salt(settings: PublisherSettings) -> bytes:
    """Return the salt of a publisher's hashes.

    Raises ConfigError if it has hash_columns and there is no salt.
    """
    salt = os.environ.get(SALT_VARIABLE, "")
    if settings.hash_columns and not salt:
        raise ConfigError(
            f"{SALT_VARIABLE} is not set, and publisher {settings.name} has hash_columns",
            "set it to a long random string that never changes: without it, a reader who guesses a value can"
            " confirm it by its hash. In Airflow, store it as the password of salt_conn_id",
        )
    return salt.encode()


class CommandParser(argparse.ArgumentParser):
    """An argument parser that exits with 78 on wrong arguments: repeating the same command will not help."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WILL_NOT_HELP, f"{self.prog}: {message}\n")


def run(
    program: str, argv: Sequence[str], make: Callable[[argparse.ArgumentParser], None], work: Work
) -> int:
    """Parse the arguments, do the work, and return its exit code; log an error as the last line."""
    parser = CommandParser(prog=program)
    parser.add_argument("--pipeline", required=True, metavar="FILE.json", help="the pipeline file")
    make(parser)
    arguments = parser.parse_args(argv)
    _log_to_stderr()
    try:
        with traces_of_threads():
            check_libraries()
            return work(Pipeline.read(arguments.pipeline), arguments)
    except PgReplError as error:
        log.error("%s: %s", error.__class__.__name__, error)
        return exit_code(error)
    except Exception as error:  # noqa: BLE001 - its text may hold values of rows
        log_unexpected(log, f"{program} failed, {BUG}", error)
        return CRASHED


@contextmanager
def traces_of_threads() -> Iterator[None]:
    """During the block, log the trace of an exception that ends a thread, or that no code can catch.

    Python itself would print the text of the exception, which may hold values of rows.
    """

    def of_thread(ended: threading.ExceptHookArgs) -> None:
        name = "a thread" if ended.thread is None else f"the thread {ended.thread.name}"
        if ended.exc_value is not None:
            log_unexpected(log, f"{name} ended", ended.exc_value)

    def of_object(failed: sys.UnraisableHookArgs) -> None:
        if failed.exc_value is not None:
            log_unexpected(log, "ignored", failed.exc_value, logging.WARNING)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = of_thread, of_object
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def leave(code: int) -> NoReturn:
    """End this process with an exit code, without finalizing the interpreter.

    During finalization native threads of libraries keep running. Sometimes one of them crashes (SIGSEGV) a
    process that has done all its work. Functions registered with `atexit` are run.
    """
    with suppress(Exception):
        atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _log_to_stderr() -> None:
    if not faulthandler.is_enabled():
        # If a library crashes, print where each thread was: names of files and functions, no values.
        faulthandler.enable(2)
    handler = log_handler(sys.stderr, os.environ)
    handler.setFormatter(process_io.formatter(os.environ.get(process_io.FORMAT_VARIABLE, "")))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    log.setLevel(process_io.level(os.environ.get(process_io.LEVEL_VARIABLE, "")))
    logging.getLogger("py4j").setLevel(logging.WARNING)


def exit_code(error: PgReplError) -> int:
    """Return the exit code for an error: 75 if running the app again later may help, else 78."""
    return RETRY_MAY_HELP if error.retry is Retry.TIMED else WILL_NOT_HELP


def end_at_once() -> NoReturn:
    """End this process as a kill would, so that none of its threads writes another byte.

    The exit code is 75.
    """
    logging.shutdown()
    os._exit(RETRY_MAY_HELP)


class StopSignal:
    """The request to end: SIGTERM, SIGINT, or the end of the parent process, as when spark-submit is killed.

    A process that has not ended `limit_s` seconds after it was asked to is ended as by a kill, which loses
    nothing. A thread of its own does this: Python runs signal handlers in the main thread only, and not while
    that waits in a library.
    """

    def __init__(self, limit_s: float = STOP_LIMIT_S) -> None:
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._parent = os.getppid()
        self._limit_s = limit_s

    def __enter__(self) -> Self:
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="pgrepl-stop", daemon=True).start()
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        self._ended.set()
        self._write_end.close()

    def install(self) -> None:
        """Install the signal handlers.

        Call it again after creating a Spark session, which replaces that of SIGINT.
        """
        for number in _STOPPING:
            signal.signal(number, lambda *_: self._asked.set())

    def _watch(self) -> None:
        """Wait for a request to end, then enforce the limit.

        The interpreter writes the numbers of signals to the socket, whatever its main thread is doing.
        """
        with self._read_end as signals:
            signals.settimeout(_PARENT_INTERVAL_S)
            while not self.is_set:
                with suppress(TimeoutError):
                    received = signals.recv(1)
                    if not received:
                        return
                    if received[0] in _STOPPING:
                        self._asked.set()
        if not self._ended.wait(self._limit_s):
            log.error(
                "shutdown did not finish within %g s: exiting at once with code %d, which loses no change",
                *(self._limit_s, RETRY_MAY_HELP),
            )
            end_at_once()

    def wait(self, seconds: float) -> bool:
        """Wait for up to `seconds`, and return True if it is time to end."""
        return self._asked.wait(seconds) or self.is_set

    @property
    def is_set(self) -> bool:
        return self._asked.is_set() or os.getppid() != self._parent


def of_snapshot(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the snapshot app: the tables to copy, and the epoch."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--tables", metavar="a.b,c.d", help="copy these tables (again), and no others")
    ways.add_argument(
        "--add",
        metavar="a.b,c.d",
        nargs="?",
        const="",
        help="add tables that the pipeline file does not list, or that were removed; without names: all new"
        " tables that match a pattern",
    )
    ways.add_argument(
        "--new-epoch",
        action="store_true",
        help="begin a new epoch: drop the slot, create a new one, and copy all tables again",
    )
    ways.add_argument(
        "--resync",
        metavar="a.b,c.d",
        nargs="?",
        const=True,
        help="the same as pgrepl resync; with names, as with its option --tables",
    )
    _add_give_up(parser, "with --new-epoch, or --resync without names: ")
    ways.add_argument(
        "--adopt",
        metavar="a.b,c.d",
        nargs="?",
        const="",
        help="compare lake tables that another program has written with the source, replace the rows that"
        " differ, and make the tables the pipeline's; with names, as with --add",
    )
    ways.add_argument(
        "--take-over",
        metavar="SLOT",
        help="begin at the position of another program's slot, so that no change is missed; stop that program"
        " first",
    )


def of_resync(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a resync: single tables, or the names that the new epoch gives up."""
    choices = parser.add_mutually_exclusive_group()
    choices.add_argument(
        "--tables",
        metavar="a.b,c.d",
        help="begin no new epoch: compare these tables at a snapshot of their own, while the others go on",
    )
    _add_give_up(choices)


def _add_give_up(parser: argparse._ActionsContainer, condition: str = "") -> None:
    parser.add_argument(
        "--give-up",
        metavar="NAME,NAME",
        help=f"{condition}the names of the source or lake that the new epoch abandons; the error of a run"
        " without this option prints them",
    )


def of_verify(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verification app: the tables to compare, and what the report shows."""
    parser.add_argument("--tables", metavar="a.b,c.d", default="", help="compare these tables, and no others")
    parser.add_argument(
        "--sample",
        type=_percent,
        metavar="1%",
        help="compare a random sample of the source's pages; rows that only the lake has are not found",
    )
    parser.add_argument(
        "--check",
        choices=(VALUES, TEXT),
        default=VALUES,
        help="compare values in the types of the lake, or the text that the server writes for each value",
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="replace the rows of the lake that differ by those of the source, and compare again",
    )
    parser.add_argument(
        "--show-keys", action="store_true", help="list the keys of up to 100 rows of each kind of difference"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=VERIFY_TIMEOUT_S,
        metavar="SECONDS",
        help="time limit for the changelog to reach the source's snapshot",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def of_replicate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the replication app: where it ends, its publisher, and its metrics."""
    parser.add_argument(
        "--until",
        type=_until,
        metavar=f"{CAUGHT_UP}|X/X",
        help="end when all that was committed at the start, or up to an LSN, is in the lake",
    )
    parser.add_argument(
        "--publish",
        metavar="NAME",
        help="run this publisher in the same process (only without lake tables); set PGREPL_TARGET_URI as for"
        " the publishing app",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus on this port"
    )
    parser.add_argument(
        "--metrics-host",
        metavar="HOST",
        help="the address on which --metrics-port listens; default: 127.0.0.1",
    )


def of_publish(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the publishing app: the publisher, where it begins and where it ends."""
    parser.add_argument(
        "--publisher", required=True, metavar="NAME", help="the name of a publisher in the pipeline file"
    )
    parser.add_argument(
        "--until",
        type=_until,
        metavar=f"{CAUGHT_UP}|X/X",
        help="end when every change in the changelog at the start, or up to an LSN, is published",
    )
    parser.add_argument(
        "--after",
        metavar="POSITION",
        help="begin after this change ID or LSN, even if this sends events again or leaves events out",
    )


def of_publish_snapshot(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the app that publishes a snapshot: publisher, table and subject."""
    parser.add_argument(
        "--publisher",
        required=True,
        metavar="NAME",
        help="the name of a publisher to NATS in the pipeline file",
    )
    parser.add_argument("--table", required=True, metavar="TABLE", help="a table of the publisher")
    parser.add_argument(
        "--subject", default="", metavar="SUBJECT", help="the subject of the snapshot; default: a new one"
    )


def of_try_events(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pgrepl events try`: the publisher, and which of its events to print."""
    parser.add_argument(
        "--publisher", required=True, metavar="NAME", help="the name of a publisher in the pipeline file"
    )
    parser.add_argument(
        "--lsn",
        metavar="X/X",
        help="print the events of the transaction that committed at this LSN; default: of the oldest changes",
    )
    parser.add_argument(
        "--limit", type=_count, metavar="N", help="print at most N events; 20 unless --lsn is given"
    )


def of_consume(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the consuming app: its file, where it ends, and the tables to resnapshot."""
    parser.add_argument("file", metavar="FILE.json", help="the consumer file")
    parser.add_argument("--until", choices=(CAUGHT_UP,), help="end at the end of the streams")
    parser.add_argument(
        "--resnapshot",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="replace these target tables by new snapshots; `all` for every target table",
    )


def as_given(options: Mapping[str, object]) -> list[str]:
    """Return parsed options as command-line arguments."""
    given = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            given.append(option)
        elif value is not None and value is not False:
            given.append(f"{option}={value}")
    return given


def _until(text: str) -> LSN | str:
    if text == CAUGHT_UP:
        return text
    try:
        return LSN.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither {CAUGHT_UP} nor an LSN (expected like 16/B374D848)"
        ) from None


def _percent(text: str) -> float:
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage above 0 and up to 100")
    return percent


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
