"""Questions to state databases that may not answer: each has a limit, and none waits for another database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from airflow_provider_pgrepl.errors import SourceConnectionError

LIMIT_S = 2.0
"""The seconds after which a database counts as not answering, when all are asked."""
DETAIL_TIMEOUT_S = 10.0
"""The same when the tables of one pipeline are asked for: there may be thousands, and nothing else waits."""
_MOST_AT_ONCE = 4
"""The most questions to a database at the same time: a page asks one, and equal ones share an answer."""
Answer = TypeVar("Answer")


class Databases(Generic[Answer]):
    """Asks databases in threads, and limits the time for an answer. May be used from any thread.

    A question that is asked again before it is answered is sent once. While a question to a database is
    overdue, others to it fail at once: threads that wait for a dead database do not pile up.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, dict[Hashable, tuple[float, Future[Answer]]]] = {}

    def ask(
        self, database: str, question: Hashable, answer: Callable[[], Answer], limit_s: float = LIMIT_S
    ) -> Answer:
        """Return what `answer` returns, or raise what it raises.

        Raises SourceConnectionError if the database does not answer within `limit_s` seconds.
        """
        future = self._begin(database, question, answer, limit_s)
        if future is None:
            raise _silent(database, limit_s)
        if not wait((future,), limit_s).done:
            raise _silent(database, limit_s)
        return future.result()

    def _begin(
        self, database: str, question: Hashable, answer: Callable[[], Answer], limit_s: float
    ) -> Future[Answer] | None:
        with self._lock:
            pending = self._pending.setdefault(database, {})
            if any(time.monotonic() > deadline for deadline, _ in pending.values()):
                return None
            if question in pending:
                return pending[question][1]
            if len(pending) >= _MOST_AT_ONCE:
                return None
            future: Future[Answer] = Future()
            pending[question] = time.monotonic() + limit_s, future
        arguments = (database, question, answer, future)
        threading.Thread(target=self._run, args=arguments, name="pgrepl-page", daemon=True).start()
        return future

    def _run(
        self, database: str, question: Hashable, answer: Callable[[], Answer], future: Future[Answer]
    ) -> None:
        try:
            found = answer()
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            self._end(database, question)
            future.set_exception(error)
        else:
            self._end(database, question)
            future.set_result(found)

    def _end(self, database: str, question: Hashable) -> None:
        with self._lock:
            self._pending[database].pop(question)


def _silent(database: str, limit_s: float) -> SourceConnectionError:
    return SourceConnectionError(
        f"the state database of connection {database} has not answered within {limit_s:g} s",
        "check host, port and firewall of the connection; the page asks again automatically",
    )
