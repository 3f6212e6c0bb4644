"""The operator that replicates changes into the lake, or into the changelog and a publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow.sdk.exceptions import AirflowException

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.connections import target_secrets
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.start_check import check_replication
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import metrics_address
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.trace import trace_of

from .lineage import OpenLineageOperator
from .spark_app import SparkAppOperator

log = logging.getLogger(__name__)

Callback = Callable[[Any], Any]
_LAG_HINT = f"find slow merges and waiting tables: {errors.document('how-to/troubleshoot')}"
PROBLEM = "pgrepl_problem"
"""The key of the problem in the context that a callback gets."""
_MODES = ("continuous", "caught_up")


class PgReplicationOperator(OpenLineageOperator, SparkAppOperator):
    """Receive changes and apply them to the lake tables.

    :param mode: `continuous` runs until it is stopped; `caught_up` succeeds once everything that was
        committed at the start is in the lake (templated)
    :param publisher: the name of a publisher that runs in the same process. Only for a pipeline without lake
        tables (`lake_tables` none) (templated)
    :param metrics_port: the port on which the app serves metrics for Prometheus; None: it serves none
        (templated)
    :param metrics_host: the address to listen on for it; by default 127.0.0.1 (templated)
    :param hand_over_after_s: with `continuous`, seconds after which the task succeeds and leaves the
        app to the next run, which adopts it. The app stops if no run adopts it within 15
        minutes.

    :param on_table_errored: a callable or a notifier, or a list of them, called when a table becomes
        `errored`
    :param on_lag: the same, called when the lake is `lag_s` seconds behind the source
    :param lag_s: the lag in seconds from which on `on_lag` is called

    The callbacks get Airflow's context, in which `pgrepl_problem` has `kind`, `object`, `reason` and `hint`.
    They are called once for each problem and try of the task.

    Other parameters: see SparkAppOperator. Set unlimited retries: an error that a retry cannot fix fails the
    task at once.
    """

    app = "replicate"
    may_replace = True
    template_fields: Sequence[str] = (
        *SparkAppOperator.template_fields,
        "mode",
        "publisher",
        "metrics_port",
        "metrics_host",
    )

    def __init__(
        self,
        *,
        mode: str = "continuous",
        publisher: str = "",
        metrics_port: int | str | None = None,
        metrics_host: str = "",
        hand_over_after_s: float | None = None,
        on_table_errored: Callback | Sequence[Callback] | None = None,
        on_lag: Callback | Sequence[Callback] | None = None,
        lag_s: float = 300.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.mode = mode
        self.publisher = publisher
        self.metrics_port = metrics_port
        self.metrics_host = metrics_host
        self.hand_over_after_s = hand_over_after_s
        self.on_table_errored = on_table_errored
        self.on_lag = on_lag
        self.lag_s = lag_s
        self._notifications: _ProblemNotifications | None = None

    def on_status(self, context: Any, status: dict[str, Any]) -> None:
        super().on_status(context, status)
        if self._notifications is None:
            self._notifications = _ProblemNotifications(
                _as_callbacks(self.on_table_errored), _as_callbacks(self.on_lag), self.lag_s
            )
        self._notifications.look(context, status)

    def app_arguments(self) -> list[str]:
        if self.mode not in _MODES:
            raise ConfigError(f"mode: {self.mode!r} must be one of {', '.join(_MODES)}")
        if self.mode == "caught_up":
            self.hand_over_after_s = None
        until = ["--until", "caught-up"] if self.mode == "caught_up" else []
        publish = ["--publish", self._publisher_settings().name] if self.publisher else []
        return [*until, *publish, *self._metrics_arguments()]

    def _metrics_arguments(self) -> list[str]:
        given = str(self.metrics_port or "").strip()
        if given and not (given.isascii() and given.isdigit()):
            raise ConfigError(f"metrics_port: {given!r} is not a port", "use a number from 1 to 65535")
        address = metrics_address(int(given) if given else None, self.metrics_host)
        return [] if address is None else [f"--metrics-port={address[1]}", f"--metrics-host={address[0]}"]

    def secrets(self) -> dict[str, str]:
        secrets = super().secrets()
        return secrets | target_secrets(self._publisher_settings()) if self.publisher else secrets

    def _publisher_settings(self) -> PublisherSettings:
        settings = self._resolved.publisher(self.publisher)
        if self._resolved.has_lake_tables:
            raise ConfigError(
                f"publisher: {settings.name}: with lake tables a publisher is an app of its own",
                "use PgPublishOperator, or set lake_tables to none",
            )
        return settings

    def check_start(self, access: Access) -> None:
        check_replication(access)

    def is_job_succeeded(self, status: str) -> bool:
        # A continuous replication that has ended must be started again.
        return self.mode == "caught_up" and super().is_job_succeeded(status)

    def ended_well(self) -> None:
        if self.mode == "continuous":
            raise AirflowException(
                "another process stopped the app of a continuous replication; a retry starts it again"
            )


def _as_callbacks(given: Callback | Sequence[Callback] | None) -> tuple[Callback, ...]:
    """Return one callback or several as a tuple, as Airflow accepts them for `on_failure_callback`."""
    if given is None:
        return ()
    return (given,) if callable(given) else tuple(given)


@dataclass
class _ProblemNotifications:
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
