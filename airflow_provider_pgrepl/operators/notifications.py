"""Notifications of the problems that a running app reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)

Callback = Callable[[Any], Any]
_LAG_HINT = f"find slow merges and waiting tables: {errors.document('how-to/troubleshoot')}"
PROBLEM = "pgrepl_problem"
"""The key of the problem in the context that a callback gets."""


def as_callbacks(given: Callback | Sequence[Callback] | None) -> tuple[Callback, ...]:
    """Return one callback or several as a tuple, as Airflow accepts them for `on_failure_callback`."""
    if given is None:
        return ()
    return (given,) if callable(given) else tuple(given)


@dataclass
class ProblemNotifications:
    """The callbacks of a task for problems of its app, and the problems that they know.

    Each problem is notified once, when it begins. A table that was repaired and is errored again, and a lag
    that was below half of its limit in between, are new problems.

    :param lag_s: the lag in seconds from which on `on_lag` is called
    """

    on_table_errored: tuple[Callback, ...] = ()
    on_lag: tuple[Callback, ...] = ()
    lag_s: float = 300.0
    _errored: frozenset[str] = field(default=frozenset(), init=False)
    _lags: bool = field(default=False, init=False)

    def look(self, context: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Call the callbacks for problems of a status that are new. An error of a callback is only logged.

        :param status: the result that the app updates every minute
        """
        errored = frozenset(status.get("errored") or ())
        for table in sorted(errored - self._errored):
            found = (status.get("errors") or {}).get(table, {})
            reason = errors.errored(table, found.get("error", ""), found.get("reason", ""))
            hint = found.get("hint") or "pgrepl status FILE.json"
            _call(self.on_table_errored, context, "table_errored", table, reason, hint)
        self._errored = errored
        lag = status.get("lag_s")
        if lag is None:
            return
        if lag >= self.lag_s and not self._lags:
            self._lags = True
            reason = f"the lake is {lag:g} s behind the source, above the limit of {self.lag_s:g} s"
            _call(self.on_lag, context, "lag", "", reason, _LAG_HINT)
        elif lag < self.lag_s / 2:
            self._lags = False


def _call(
    callbacks: Sequence[Callback], context: Mapping[str, Any], kind: str, of: str, reason: str, hint: str
) -> None:
    problem = {"kind": kind, "object": of, "reason": reason, "hint": hint}
    for callback in callbacks:
        try:
            callback({**context, PROBLEM: problem})
        except Exception as error:  # noqa: BLE001 - a notifier that fails must not end the replication
            log.error("the notification of %s failed: %s", kind, trace_of(error))
