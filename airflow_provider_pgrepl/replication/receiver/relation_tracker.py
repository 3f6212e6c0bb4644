"""The tracker of relation definitions in the stream, from Relation messages and event trigger messages.

A Relation message does not say at which LSN the catalog changed to its current state. A message of the event
trigger does, and carries the catalog rows as of that LSN. So while the same event trigger is active, a
relation keeps its last known definition until a message changes it, whatever the catalog contains by now.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from airflow_provider_pgrepl.errors import PublicationError, SourceConnectionError, SourceError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import EffectiveFrom, RelationIndex
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.matching import HiddenColumns
from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX, LogicalMessage, RelationMessage
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA, Relation
from airflow_provider_pgrepl.replication.source.catalog.followed_names import FollowedNames
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger.message import (
    ANYTHING,
    DdlMessage,
    SealedMessage,
    parse_ddl_message,
    read_sealed,
)

from .changelog_rows import Ddl
from .continuity import check_publication

log = logging.getLogger(__name__)

ReadRelation = Callable[[int, int], Relation | None]
"""Returns the current table with this oid. The second argument is the xid that announces it, or 0."""
NameInPipeline = Callable[[int, TableName], TableName]
"""Returns the pipeline's name of a table with this oid, which has this name at the source."""
ReadTrigger = Callable[[], str | None]
ReadKey = Callable[[], bytes | None]

Result = TypeVar("Result")

_WARN_EVERY_S = 60.0
_PAUSES_S = (0.02, 0.1, 0.5)


class RelationTracker:
    """A lookup of relations for one session of the receiver. Adds each relation to the index before its use.

    `name_of`: relations get the name in the pipeline that it returns. `read_trigger` returns the identity of
    the active event trigger, or None without one. `read_key` returns the key that seals its messages, or None
    if the key cannot be read.
    """

    def __init__(
        self,
        pipeline: str,
        publication: str,
        epoch: Epoch,
        index: RelationIndex,
        read_relation: ReadRelation,
        read_trigger: ReadTrigger,
        read_key: ReadKey = lambda: None,
        hidden: HiddenColumns | None = None,
        name_of: NameInPipeline = lambda _oid, name: name,
    ) -> None:
        self._pipeline = pipeline
        self._publication = publication
        self._epoch = epoch
        self._index = index
        self._read_from_catalog = read_relation
        self._hidden = hidden
        self._name_of = name_of
        self._read_trigger = read_trigger
        self._read_key = read_key
        self._key: bytes | None = None
        self._warned_at = -_WARN_EVERY_S
        self._forgotten_at = -1
        self._messages: dict[int, RelationMessage] = {}
        self._known: dict[int, tuple[RelationRecord, str]] = {}

    def received(self, message: RelationMessage, commit_lsn: int, xid: int) -> RelationRecord | None:
        """Return the record of a Relation message, or None for one of this package's own tables.

        Recording changes of the package's own tables would cause further changes.

        The catalog may be newer than the message. The last known definition still applies if no DDL can have
        gone unreported since: the trigger that reported it, or was active when it was read, is still active.
        """
        if self._is_ours(RelationRecord(message, None)):
            return None
        name = self._name_of(message.oid, TableName(message.schema, message.name))
        message = replace(message, schema=name.schema, name=name.name)
        self._messages[message.oid] = message
        self._learn_selected()
        # Read the trigger first: DDL between the two reads is still to come in the stream, if it is reported.
        trigger = self._read_trigger()
        found = self._read_relation(message.oid, xid)
        using = self._may_have_had_using(message.oid, commit_lsn, trigger)
        record = RelationRecord(message, found, using)
        if trigger is not None:
            known = self._last_known(message.oid, commit_lsn)
            if known is not None and known[1] == trigger:
                catalog = known[0].catalog and known[0].catalog.followed_as(name)
                earlier = RelationRecord(message, catalog, using)
                if earlier.agrees and _differ_in_files_only(earlier.catalog, found):
                    record = _watched(record, earlier.catalog)
                elif earlier.agrees:
                    record = earlier
        return self._remember(record, trigger, commit_lsn)

    def look_at_ddl(self, message: LogicalMessage, commit_lsn: int, xid: int) -> Ddl | None:
        """Return the DDL in a logical message, or None if it is not from this pipeline's event trigger.

        Returns None as well if the table is unknown, or one of this package's own.
        """
        if message.prefix == DDL_PREFIX and message.left_out:
            return self._look_at_all(commit_lsn)
        sealed = read_sealed(message.content) if message.prefix == DDL_PREFIX else None
        if sealed is None or sealed.pipeline != self._pipeline:
            return None
        is_genuine = self._is_genuine(sealed, xid)
        if is_genuine is False:
            self._warn_of_forgery(xid)
            return None
        # Without the key the sender cannot be verified. It may be the trigger, so assume any DDL.
        ddl = parse_ddl_message(sealed.said, self._publication) if is_genuine else ANYTHING
        self._learn_selected()
        if not ddl.oid:
            return self._look_at_all(commit_lsn)
        record, trigger = self._touched(ddl, commit_lsn), ddl.trigger
        if record is None or self._is_ours(record):
            return None
        if self._may_have_had_using(ddl.oid, commit_lsn, trigger):
            record = replace(record, using=True)
        known = self._last_known(ddl.oid, commit_lsn)
        if ddl.relation is not None and known is not None and known[1] == trigger:
            record = _watched(record, known[0].catalog)
        if ddl.gone is None and ddl.relation is None:
            trigger = self._read_trigger() or ""
            record = replace(record, catalog=self._read_relation(ddl.oid))
        received = self._messages.get(ddl.oid)
        if received is not None and RelationRecord(received, record.catalog).agrees:
            # The server may not send the Relation message again: for pgoutput, nothing has changed.
            record = replace(record, message=received)
        else:
            received = None
        record = self._remember(record, trigger or None, commit_lsn)
        return Ddl(record, () if received is None else (record,))

    def _learn_selected(self) -> None:
        """Load relations that other processes have indexed, if column names are excluded.

        A column may have had an excluded name only at the time when a snapshot selected its table.
        """
        if self._hidden is not None and self._hidden.names:
            self._index.catch_up()

    def _is_genuine(self, message: SealedMessage, xid: int) -> bool | None:
        """Return True if this pipeline's event trigger wrote the message, None if the key cannot be read."""
        if self._key is not None and message.is_genuine(self._key, xid):
            return True
        self._key = self._read_key()  # the trigger may have been recreated with another key
        return None if self._key is None else message.is_genuine(self._key, xid)

    def _warn_of_forgery(self, xid: int) -> None:
        if time.monotonic() - self._warned_at < _WARN_EVERY_S:
            return
        self._warned_at = time.monotonic()
        log.warning(
            "ignored a message of transaction %d with prefix %s that the event trigger did not send."
            " To prevent such messages, revoke EXECUTE on pg_logical_emit_message from the roles"
            " that send them",
            xid,
            DDL_PREFIX,
        )

    def _touched(self, ddl: DdlMessage, commit_lsn: int) -> RelationRecord | None:
        """Return the message's relation as if the stream had sent it, or None for an unknown table."""
        if ddl.relation is not None:
            relation = self._with_had_rows(self._named(ddl.relation))
            relation = relation if self._hidden is None else self._hidden.bare(relation) or relation
            return replace(RelationRecord.of_catalog(relation), using=ddl.using)
        known = self._last_known(ddl.oid, commit_lsn)
        last = self._messages.get(ddl.oid) or (known[0].message if known else None)
        return None if last is None else RelationRecord(last, None, ddl.using)

    def _is_ours(self, record: RelationRecord) -> bool:
        return record.message.schema == STATE_SCHEMA and self._was_always_ours(record.message.oid)

    def _was_always_ours(self, oid: int) -> bool:
        """Return True if no known name of the table is in another schema.

        DDL of a table that was moved into this package's schema is recorded like that of any moved table.
        """
        return all(name.schema == STATE_SCHEMA for name in self._index.names(oid))

    def _with_had_rows(self, relation: Relation) -> Relation:
        """Return the relation with `had_rows` of its partitions from the catalog; messages do not carry it.

        A partition that no longer exists, or was attached again since, counts as having had rows.
        """
        if not relation.partitions:
            return relation
        now = self._read_relation(relation.oid)
        known = {(part.oid, part.links): part.had_rows for part in now.partitions} if now else {}
        partitions = (
            replace(part, had_rows=known.get((part.oid, part.links), True)) for part in relation.partitions
        )
        return replace(relation, partitions=tuple(partitions))

    def _look_at_all(self, commit_lsn: int) -> Ddl:
        """Read all relations of the session from the catalog again, because any of them may have changed.

        A relation that no longer agrees with its catalog rows counts as changed with USING.
        """
        self._known.clear()
        self._forgotten_at = commit_lsn
        self._index.forget(self._epoch, commit_lsn)
        trigger = self._read_trigger()
        records = [
            RelationRecord(message, self._read_relation(oid)) for oid, message in self._messages.items()
        ]
        marked = (record if record.agrees else replace(record, using=True) for record in records)
        return Ddl(effective=tuple(self._remember(record, trigger, commit_lsn) for record in marked))

    def _may_have_had_using(self, oid: int, commit_lsn: int, trigger: str | None) -> bool:
        """Return True if DDL that may have had USING ran since columns and catalog last agreed.

        Without a known record and an active event trigger, only DDL of this session counts.
        """
        known = self._last_known(oid, commit_lsn)
        if known is not None:
            return known[0].using and not known[0].agrees
        if self._forgotten_at >= 0:
            return True
        return trigger is not None and self._index.is_forgotten(self._epoch, oid, commit_lsn)

    def _last_known(self, oid: int, commit_lsn: int) -> tuple[RelationRecord, str] | None:
        known = self._known.get(oid)
        if known is not None:
            return known
        found = self._index.effective(self._epoch, oid, commit_lsn)
        if found is None or found[1].commit_lsn <= self._forgotten_at:
            return None
        return found[0], found[1].trigger

    def _read_relation(self, oid: int, received_xid: int = 0) -> Relation | None:
        found = self._read_from_catalog(oid, received_xid)
        found = found and self._named(found)
        return found if self._hidden is None else self._hidden.bare(found)

    def _named(self, relation: Relation) -> Relation:
        return relation.followed_as(self._name_of(relation.oid, relation.table))

    def _remember(self, record: RelationRecord, trigger: str | None, commit_lsn: int) -> RelationRecord:
        """Add the record to the index, with its hidden columns marked, and return it."""
        if self._hidden is not None:
            record = self._hidden.mark(record)
        place = None if trigger is None else EffectiveFrom(commit_lsn, trigger)
        self._index.add(self._epoch, record, place)
        if trigger is None:
            self._known.pop(record.message.oid, None)
        else:
            self._known[record.message.oid] = record, trigger
        return record


def _watched(record: RelationRecord, known: Relation | None) -> RelationRecord:
    """Return the record, with `watched` set if its table files differ from those of `known`.

    DDL that replaces files and can lose rows would have been reported by the event trigger.
    """
    if known is None or record.catalog is None or record.catalog.relkind == "p":
        return record
    return replace(
        record,
        watched=known.files.keys() == record.catalog.files.keys() and known.files != record.catalog.files,
    )


def _differ_in_files_only(earlier: Relation | None, now: Relation | None) -> bool:
    """Return True if the relations differ at most in files, as after TRUNCATE or VACUUM FULL.

    These commands fire no event trigger. `had_rows` of partitions is not compared: it is determined on each
    read, and not always with the same certainty.
    """
    return earlier is not None and now is not None and _without_files(earlier) == _without_files(now)


def _without_files(relation: Relation) -> Relation:
    partitions = tuple(replace(part, relfilenode=0, had_rows=False, xmin=0) for part in relation.partitions)
    return replace(relation, relfilenode=0, xmin=0, partitions=partitions)


def _repeated(read: Callable[[], Result | None], oid: int) -> Result | None:
    """Return what was read of the catalog about a table; None, after an error was logged, if it cannot be
    read after retries, so that other tables continue."""
    for pause_s in (*_PAUSES_S, None):
        try:
            return read()
        except (PublicationError, SourceConnectionError):
            raise
        except (SourceError, LookupError) as error:
            if pause_s is None:
                log.error("what the catalog says of the table with oid %s cannot be read: %r", oid, error)
            else:
                # Some catalog functions see a later state than the query: DDL may have run in between.
                time.sleep(pause_s)
    return None


class CatalogWatch:
    """A reader of the catalog, over a connection that only it uses. It does not wait for table locks."""

    def __init__(self, connection: Connection, record: EpochRecord, *, trusts_owners: bool = False) -> None:
        self._connection = connection
        self._record = record
        self._trusts_owners = trusts_owners

    def read_relation(self, oid: int, received_xid: int = 0) -> Relation | None:
        """Return the current table, or None if it does not exist.

        `received_xid`: the xid of the transaction in which the stream announces it. If its catalog rows still
        cannot be read after retries, logs the error and returns None, so that other tables continue. Raises
        PublicationError, SourceConnectionError.
        """
        self.check_publication()
        return _repeated(lambda: self._read(oid, received_xid), oid)

    def find_name(self, followed: FollowedNames, oid: int, now: TableName) -> TableName:
        """Return the pipeline's name of a table that has the name `now`: that one if the catalog cannot be
        read after retries. Raises SourceConnectionError."""
        return _repeated(lambda: followed.find(self._connection, oid, now), oid) or now

    def _read(self, oid: int, received_xid: int) -> Relation | None:
        return read_relation(
            self._connection,
            oid,
            self._record.publication,
            had_rows=True,
            trusts_owners=self._trusts_owners,
            received_xid=received_xid,
        )

    def check_publication(self) -> None:
        """Raise PublicationError if the publication is missing, recreated, or leaves out kinds of changes.

        PostgreSQL 18 and later only warn about a missing publication, and send nothing.
        """
        check_publication(self._connection, self._record.publication, self._record.publication_oid)
