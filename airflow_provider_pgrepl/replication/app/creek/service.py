"""The process that replaces creek: has tables copied and replicated, and their changes published.

It starts an app again after every end that a restart may resolve.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from airflow_provider_pgrepl.errors import PgReplError, SourceConnectionError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import find_epoch, tables_copied_differently
from airflow_provider_pgrepl.replication.app.evidence import check
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.process import StopSignal
from airflow_provider_pgrepl.replication.app.replicate import replicate
from airflow_provider_pgrepl.replication.app.tables import Records, read_records
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime import process_io
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.trace import log_unexpected

from .deployment import OPTIONS_VARIABLE, PUBLISHER, ChildProcess, Deployment, SourceTables

log = logging.getLogger(__name__)

_LOOK_S = 30.0

Tables = frozenset[TableName]
_TICK_S, _PAUSE_S = 0.5, 5.0
_BEGUN_AGAIN = (process.RETRY_MAY_HELP, process.DONE, process.CRASHED)


class FollowedTables:
    """The tables of the publication: new ones are added to the pipeline, and missing ones are removed from
    it.

    `add`: returns a snapshot app that adds a comma-separated list of tables.
    """

    def __init__(self, source: SourceTables, access: Access, add: Callable[[str], ChildProcess]) -> None:
        self._source, self._access, self._add = source, access, add
        self._adding: ChildProcess | None = None
        self._being_added: Tables = frozenset()
        self._one_by_one: list[TableName] = []
        self._refused: Tables = frozenset()
        self._looked_at = 0.0
        self._said = ""

    def follow(self) -> None:
        """Check for tables to add or remove, and begin to do so. Called repeatedly."""
        if self._adding is not None and not self._has_added(self._adding):
            return
        if self._one_by_one:
            self._begin_adding({self._one_by_one.pop()})
            return
        if not self._source.has_news() and time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            self._say_once(self._compare(self._source.published(), self.taken()))
        except SourceConnectionError as error:
            log.warning("the publication was not looked at: %s", error.message)
        except PgReplError as error:
            self._say_once(f"the publication's tables are not followed: {error}")

    def taken(self) -> Tables:
        """Return the pipeline's tables. Raises StateError if the pipeline has not begun."""
        return frozenset(
            table
            for table, record in self._records().items()
            if record.membership != "removed" and record.state is not TableState.REMOVED
        )

    def has_copied(self) -> bool:
        """Return True if any table is in the lake."""
        try:
            return any(record.position_lsn is not None for record in self._records().values())
        except PgReplError:
            return False

    def end(self) -> None:
        """Ask the app that adds tables to end, and wait until it has ended."""
        if self._adding is not None:
            self._adding.ask_to_end()
            self._adding.wait()

    def _records(self) -> Records:
        with self._access.state_db("creek") as state_db:
            return state_db.read_tables(self._access.pipeline.name)

    def _compare(self, published: Tables, taken: Tables) -> str:
        """Begin to add tables, or remove tables. Return the reason if that is not possible, else ""."""
        self._refused &= published
        if added := published - taken - self._refused:
            self._begin_adding(added)
            return ""
        gone = taken - published
        if gone and gone == taken:
            return "no table of the pipeline is in the publication any more: they stay as they are"
        if gone:
            remove_tables(self._access, gone)
            log.info("removed: %s; their lake tables stay", ", ".join(map(str, sorted(gone))))
        return ""

    def _begin_adding(self, tables: Collection[TableName]) -> None:
        names = ",".join(map(str, sorted(tables)))
        log.info("adding %s", names)
        self._being_added = frozenset(tables)
        self._adding = self._add(names)
        self._adding.start()

    def _has_added(self, adding: ChildProcess) -> bool:
        code = adding.ended()
        if code is None:
            return False
        self._adding, self._looked_at = None, 0.0
        if code == process.WILL_NOT_HELP and len(self._being_added) > 1:
            # One of the tables causes the error: add them one by one, so that the others do not wait for it.
            self._one_by_one = sorted(self._being_added, reverse=True)
        elif code == process.WILL_NOT_HELP:
            self._refused |= self._being_added
            log.error(
                "%s cannot be added: fix the error above, then start the service again",
                *map(str, self._being_added),
            )
        return True

    def _say_once(self, text: str) -> None:
        if text and text != self._said:
            log.error("%s", text)
        self._said = text


def run(_: argparse.Namespace) -> int:
    """Run until stopped, or until an error that does not resolve itself, and return the exit code.

    Raises ConfigError for the environment, and other errors that keep the pipeline from beginning.
    """
    deployment = Deployment.of(os.environ)
    _log(deployment)
    with StopSignal() as stop, closing(SourceTables(deployment)) as source:
        planned = deployment.pipeline(source.planned())
        with StateDatabase(_state_dsn(deployment), f"creek {planned.name}") as state_db:
            # Before anything is created at the source: PG_URI may name another database than the lake's.
            check(planned, state_db, deployment.dsn, lake_may_fail=True)
            source.prepare()
            pipeline = _as_it_began(deployment, state_db, deployment.pipeline(source.published()))
        return Service(deployment, pipeline, source, stop).run()


def _as_it_began(deployment: Deployment, state_db: StateDatabase, pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with lake tables, if earlier versions created them and the environment does not
    decide."""
    if "lake_tables" in deployment.options:
        return pipeline
    if not tables_copied_differently(pipeline, read_records(state_db, pipeline)):
        return pipeline
    log.warning(
        "this deployment has lake tables, which it keeps. To go on without them, and without Spark, set %s to"
        ' {"lake_tables": "none"}',
        OPTIONS_VARIABLE,
    )
    return replace(pipeline, lake_tables="all")


def _state_dsn(deployment: Deployment) -> str:
    return os.environ.get(process.STATE_DSN_VARIABLE, "").strip() or deployment.dsn


def _log(deployment: Deployment) -> None:
    ours = logging.getLogger("airflow_provider_pgrepl")
    ours.setLevel(process_io.level(deployment.log_level))
    if deployment.without_effect:
        log.warning("without effect, as with creek: %s", ", ".join(deployment.without_effect))


def _folder_of(lake_root: str) -> str:
    """Return the folder on this host for the pipeline file, which the apps and the user's commands read.

    With an object store, create a temporary folder for it.
    """
    return mkdtemp(prefix="pgrepl-") if is_object_store(lake_root) else system_folder(lake_root)


@contextmanager
def _variables(more: Mapping[str, str]) -> Iterator[None]:
    """Set more environment variables during the block."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Service:
    """One run of the process."""

    def __init__(
        self, deployment: Deployment, pipeline: Pipeline, source: SourceTables, stop: StopSignal
    ) -> None:
        self._source, self._stop = source, stop
        self._slot = deployment.replaced_slot
        self._file = Path(_folder_of(pipeline.lake_root), "pipeline.json")
        self._environment = {
            process.DSN_VARIABLE: deployment.dsn,
            process.TARGET_VARIABLE: deployment.nats_uri,
            process_io.LEVEL_VARIABLE: deployment.log_level,
        }
        self._access = Access(pipeline, deployment.dsn, _state_dsn(deployment))
        self._lasting: list[ChildProcess] = []
        if pipeline.has_lake_tables:
            self._lasting = [self._child("replicate"), self._child("publish", "--publisher", PUBLISHER)]
        self._tables = FollowedTables(
            source, self._access, lambda names: self._child("snapshot", "--add", names)
        )

    def run(self) -> int:
        """Run until stopped or until an app ends for good, and return the exit code."""
        # Raises LakeError before anything is written into the lake of another pipeline.
        find_epoch(self._access.pipeline)
        self._write_file()
        log.info("the pipeline %s is in %s", self._access.pipeline.name, self._file)
        try:
            code = self._begin()
            if code == process.DONE and not self._stop.is_set:
                try:
                    code = self._keep() if self._lasting else self._keep_here()
                finally:
                    self._end()
        finally:
            if is_object_store(self._access.pipeline.lake_root):
                rmtree(self._file.parent, ignore_errors=True)
        return code

    def _write_file(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(self._access.pipeline.to_json(), encoding="utf-8")
        unfinished.replace(self._file)

    def _child(self, app: str, *arguments: str) -> ChildProcess:
        return ChildProcess(app, ["--pipeline", str(self._file), *arguments], self._environment)

    def _begin(self) -> int:
        """Copy the tables that are not copied yet, and return the exit code.

        If creek's slot exists, the pipeline begins at its position.
        """
        while not self._stop.is_set:
            slot = self._source.replaced_slot()
            copying = self._child("snapshot", *(("--take-over", slot.name) if slot is not None else ()))
            code = self._finished(copying)
            if code == process.WILL_NOT_HELP and self._tables.has_copied():
                log.error("some tables are errored, see above; the others go on")
                code = process.DONE
            if code != process.RETRY_MAY_HELP:
                self._say_of_slot()
                return code
            self._stop.wait(_PAUSE_S)
        return process.DONE

    def _finished(self, child: ChildProcess) -> int:
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
                    log.error("%s exited with code %d, which a restart does not fix", child.app, code)
                    return code
                if code is not None:
                    log.warning("%s ended with code %d, and is started again", child.app, code)
                if child.is_due:
                    child.start()
            self._tables.follow()
            self._stop.wait(_TICK_S)
        return process.DONE

    def _keep_here(self) -> int:
        """Run receiver and publisher in this process, for a pipeline without lake tables, and start them
        again."""
        while not self._stop.is_set:
            code = self._replicate()
            if code not in _BEGUN_AGAIN or self._stop.is_set:
                return code
            log.warning("replication ended with code %d, and is started again", code)
            self._stop.wait(_PAUSE_S)
        return process.DONE

    def _replicate(self) -> int:
        with _variables(self._environment):
            try:
                return replicate(
                    self._access.pipeline, self._stop, publisher=PUBLISHER, meanwhile=self._tables.follow
                )
            except PgReplError as error:
                log.error("%s: %s", type(error).__name__, error)
                return process.exit_code(error)
            except Exception as error:  # noqa: BLE001 - its text may hold values of rows
                log_unexpected(log, "replication ended", error)
                return process.CRASHED

    def _end(self) -> None:
        for child in self._lasting:
            child.ask_to_end()
        self._tables.end()
        for child in self._lasting:
            child.wait()
