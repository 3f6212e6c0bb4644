"""Statements that wait for an answer no longer than a limit, also when the network swallows it in silence.

A limit of the server's (`statement_timeout`) ends nothing for a client whom no message reaches, and TCP does
not notice a tunnel that keeps the line and delivers nothing. So the client looks at the clock, and shuts the
socket down: libpq then finds the connection closed, in whatever thread waits for it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg2
import psycopg2.extensions

ANSWER_LIMIT_S = 60.0
"""How long a statement may take: those that work on catalogs and on our own state take milliseconds."""


@contextmanager
def answered_within(fileno: int, limit_s: float | None) -> Iterator[threading.Event]:
    """The socket is shut down when the block takes longer; the event says that it was. None is no limit.

    Raises psycopg2.OperationalError when there is no socket any more.
    """
    overdue = threading.Event()
    if limit_s is None:
        yield overdue
        return
    with _line(fileno) as line:

        def end() -> None:
            overdue.set()
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield overdue
        finally:
            timer.cancel()
            timer.join()


def _line(fileno: int) -> socket.socket:
    """The socket by a descriptor of our own: the number may be another connection's when the time is over."""
    try:
        return socket.socket(fileno=os.dup(fileno))
    except OSError:
        # libpq has closed it, in another thread's statement, and the driver does not know it yet.
        raise psycopg2.OperationalError("the connection was lost") from None


def abandon(connection: psycopg2.extensions.connection) -> None:
    """Shut the socket down without a word to the server: who waits for it, waits no longer.

    May be called from any thread, and for a connection that is closed.
    """
    with suppress(psycopg2.Error, OSError), _line(connection.fileno()) as line:
        line.shutdown(socket.SHUT_RDWR)


class LimitedCursor(psycopg2.extensions.cursor):
    """Its `execute` keeps to the `answer_limit_s` of its connection."""

    def execute(self, *arguments: Any, **named: Any) -> None:
        """Raises psycopg2.OperationalError when there is no answer in time."""
        assert isinstance(self.connection, LimitedConnection)
        limit_s = self.connection.answer_limit_s
        with answered_within(self.connection.fileno(), limit_s) as overdue:
            try:
                super().execute(*arguments, **named)
            except psycopg2.Error:
                if overdue.is_set():
                    raise _no_answer(limit_s) from None
                raise


class LimitedConnection(psycopg2.extensions.connection):
    """A connection whose statements keep to a limit."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.answer_limit_s: float | None = ANSWER_LIMIT_S
        self.cursor_factory = LimitedCursor


@contextmanager
def patience(connection: psycopg2.extensions.connection, limit_s: float | None) -> Iterator[None]:
    """Statements of the block, which wait for others or work long, have another limit; None is none."""
    if not isinstance(connection, LimitedConnection):
        yield
        return
    before, connection.answer_limit_s = connection.answer_limit_s, limit_s
    try:
        yield
    finally:
        connection.answer_limit_s = before


def _no_answer(limit_s: float | None) -> psycopg2.OperationalError:
    return psycopg2.OperationalError(
        f"no answer within {limit_s:g} s: the network swallows what is sent, or the statement waits for a"
        " lock that somebody holds"
    )
