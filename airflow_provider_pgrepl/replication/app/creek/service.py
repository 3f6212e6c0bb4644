"""The process in creek's place: it has the tables copied and kept, their changes published, and all of it
begun again whenever an app ends that may be."""

from __future__ import annotations

import argparse
import logging
import os
import time
from contextlib import closing, suppress
from pathlib import Path

from airflow_provider_pgrepl.errors import PgReplError, SourceConnectionError
from airflow_provider_pgrepl.replication import log_lines
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.creek.child import Child
from airflow_provider_pgrepl.replication.app.creek.deployment import PUBLISHER, Deployment
from airflow_provider_pgrepl.replication.app.creek.source_tables import SourceTables
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.process import StopSignal
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.state.table_state import TableState

log = logging.getLogger(__name__)

_TICK_S, _LOOK_S, _PAUSE_S = 0.5, 30.0, 5.0
_BEGUN_AGAIN = (process.RETRY_MAY_HELP, process.DONE, process.CRASHED)


def run(_: argparse.Namespace) -> int:
    """Run until stopped, or until something is wrong that does not pass by itself; returns the exit code.

    Raises ConfigError for what the environment says, and what else keeps the pipeline from beginning.
    """
    deployment = Deployment.of(os.environ)
    _log(deployment)
    with StopSignal() as stop, closing(SourceTables(deployment)) as source:
        source.prepare()
        pipeline = deployment.pipeline(source.published())
        return Service(deployment, pipeline, source, stop).run()


def _log(deployment: Deployment) -> None:
    ours = logging.getLogger("airflow_provider_pgrepl")
    ours.setLevel(log_lines.level(deployment.log_level))
    if deployment.without_effect:
        log.warning("without effect, as with creek: %s", ", ".join(deployment.without_effect))


class Service:
    """One run."""

    def __init__(
        self, deployment: Deployment, pipeline: Pipeline, source: SourceTables, stop: StopSignal
    ) -> None:
        self._source, self._stop = source, stop
        self._slot = deployment.replaced_slot
        self._file = Path(system_folder(pipeline.lake_root), "pipeline.json")
        self._environment = {
            process.DSN_VARIABLE: deployment.dsn,
            process.TARGET_VARIABLE: deployment.nats_uri,
            log_lines.LEVEL_VARIABLE: deployment.log_level,
        }
        state_dsn = os.environ.get(process.STATE_DSN_VARIABLE, "").strip() or deployment.dsn
        self._access = Access(pipeline, deployment.dsn, state_dsn)
        self._lasting = [self._child("replicate"), self._child("publish", "--publisher", PUBLISHER)]
        self._adding: Child | None = None
        self._refused: frozenset[TableName] = frozenset()
        self._looked_at = 0.0

    def run(self) -> int:
        """Until stopped; the exit code."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(self._access.pipeline.to_json(), encoding="utf-8")
        log.info("the pipeline %s is in %s", self._access.pipeline.name, self._file)
        code = self._begin()
        if code == process.DONE and not self._stop.is_set:
            try:
                code = self._keep()
            finally:
                self._end()
        return code

    def _child(self, app: str, *arguments: str) -> Child:
        return Child(app, ["--pipeline", str(self._file), *arguments], self._environment)

    def _begin(self) -> int:
        """Have the tables copied that are not yet; where creek has stopped, that is where this begins."""
        while not self._stop.is_set:
            slot = self._source.replaced_slot()
            copying = self._child("snapshot", *(("--take-over", slot.name) if slot is not None else ()))
            code = self._finished(copying)
            if code != process.RETRY_MAY_HELP:
                self._say_of_slot()
                return code
            self._stop.wait(_PAUSE_S)
        return process.DONE

    def _finished(self, child: Child) -> int:
        child.start()
        while (code := child.ended()) is None:
            if self._stop.wait(_TICK_S):
                child.ask_to_end()
                child.wait()
                return process.DONE
        return code

    def _say_of_slot(self) -> None:
        with suppress(PgReplError):
            slot = self._source.replaced_slot()
            if slot is not None and not slot.active:
                log.warning(
                    "the slot %s is read by nobody any more, and holds the source's WAL: when creek is not to"
                    " come back, SELECT pg_drop_replication_slot('%s')",
                    *(slot.name, slot.name),
                )

    def _keep(self) -> int:
        while not self._stop.is_set:
            for child in self._lasting:
                code = child.ended()
                if code is not None and code not in _BEGUN_AGAIN and code > 0:
                    log.error("%s ended with code %d, which starting it again does not mend", child.app, code)
                    return code
                if code is not None:
                    log.warning("%s ended with code %d, and is started again", child.app, code)
                if child.is_due:
                    child.start()
            self._follow_publication()
            self._stop.wait(_TICK_S)
        return process.DONE

    def _end(self) -> None:
        children = [*self._lasting, *([self._adding] if self._adding else [])]
        for child in children:
            child.ask_to_end()
        for child in children:
            child.wait()

    # --- tables that come and go ---

    def _follow_publication(self) -> None:
        if self._adding is not None:
            code = self._adding.ended()
            if code is None:
                return
            if code == process.WILL_NOT_HELP:
                log.error("tables that were added cannot be taken: mend that, then start this again")
            else:
                self._refused = frozenset()
            self._adding = None
        if not self._source.has_news() and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            self._compare(self._source.published(), self._taken())
        except SourceConnectionError as error:
            log.warning("the publication was not looked at: %s", error.message)
        except PgReplError as error:
            log.error("the publication's tables are not followed: %s", error)

    def _compare(self, published: frozenset[TableName], taken: frozenset[TableName]) -> None:
        if gone := taken - published:
            remove_tables(self._access, gone)
            log.info("removed: %s; their lake tables stay", ", ".join(map(str, sorted(gone))))
        if added := published - taken - self._refused:
            names = ",".join(map(str, sorted(added)))
            log.info("added: %s", names)
            # Those that cannot be taken are not tried again and again.
            self._refused = published - taken
            self._adding = self._child("snapshot", "--add", names)
            self._adding.start()

    def _taken(self) -> frozenset[TableName]:
        with self._access.store("creek") as store:
            records = store.read_tables(self._access.pipeline.name)
        return frozenset(
            table
            for table, record in records.items()
            if record.membership != "removed" and record.state is not TableState.REMOVED
        )
