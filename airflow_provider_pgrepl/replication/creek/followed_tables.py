"""FollowedTables: the pipeline's tables are kept those of the publication, while the apps run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from airflow_provider_pgrepl.errors import PgReplError, SourceConnectionError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.creek.child import Child
from airflow_provider_pgrepl.replication.creek.source_tables import SourceTables
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.table_state import TableState

log = logging.getLogger(__name__)

_LOOK_S = 30.0

Tables = frozenset[TableName]


class FollowedTables:
    """`add`: a snapshot app that is to add the tables of a comma list."""

    def __init__(self, source: SourceTables, access: Access, add: Callable[[str], Child]) -> None:
        self._source, self._access, self._add = source, access, add
        self._adding: Child | None = None
        self._being_added: Tables = frozenset()
        self._one_by_one: list[TableName] = []
        self._refused: Tables = frozenset()
        self._looked_at = 0.0
        self._said = ""

    def follow(self) -> None:
        """Look whether anything is to be done, and begin it; called again and again."""
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
        """The pipeline's tables. Raises StateError when it has not begun."""
        return frozenset(
            table
            for table, record in self._records().items()
            if record.membership != "removed" and record.state is not TableState.REMOVED
        )

    def has_copied(self) -> bool:
        """Whether any table is in the lake."""
        try:
            return any(record.position_lsn is not None for record in self._records().values())
        except PgReplError:
            return False

    def end(self) -> None:
        """Ask the app that adds tables to end, and wait for that."""
        if self._adding is not None:
            self._adding.ask_to_end()
            self._adding.wait()

    def _records(self) -> Records:
        with self._access.store("creek") as store:
            return store.read_tables(self._access.pipeline.name)

    def _compare(self, published: Tables, taken: Tables) -> str:
        """Begin what is to be done; why nothing can be, if so."""
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

    def _has_added(self, adding: Child) -> bool:
        code = adding.ended()
        if code is None:
            return False
        self._adding, self._looked_at = None, 0.0
        if code == process.WILL_NOT_HELP and len(self._being_added) > 1:
            # One of them is to blame; the others are not to wait for it.
            self._one_by_one = sorted(self._being_added, reverse=True)
        elif code == process.WILL_NOT_HELP:
            self._refused |= self._being_added
            log.error("%s cannot be taken: mend that, then start this again", *map(str, self._being_added))
        return True

    def _say_once(self, text: str) -> None:
        if text and text != self._said:
            log.error("%s", text)
        self._said = text
