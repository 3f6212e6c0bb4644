"""The slot and publication that a pipeline owns at its source, and the number of a lake's next epoch.

If the changelog is missing, only the consistent points, the relation index and the lake tables identify the
lake and its epochs. App IDs of tables contain the pipeline's name, which a pipeline of another server may
have too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import LakeError, PgReplError, PublicationError, SlotError, StateError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints, points_uri
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_former, read_apps
from airflow_provider_pgrepl.replication.lake.history.table import history_path
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier, quote_literal
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import RESNAPSHOT_OF_ALTERED
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.server import Server, known_source
from airflow_provider_pgrepl.replication.source.slot import drop_slot, read_slot, reason_to_keep
from airflow_provider_pgrepl.replication.state.database import PipelineRecord, StateDatabase
from airflow_provider_pgrepl.replication.storage.durable import is_same_place

log = logging.getLogger(__name__)

_ALL_CHANGES = "insert, update, delete, truncate"


@dataclass
class SourceOwnership:
    """The slot and publication of a pipeline.

    Drops or alters nothing that another pipeline or a person has made.
    """

    dsn: str
    source: Connection
    pipeline: Pipeline
    state_db: StateDatabase
    _made: int | None = None
    """The oid of the publication that this run created, until the epoch begins."""

    def claim(self, server: Server, last: EpochRecord | None, *, replace_record: bool = False) -> None:
        """Check that slot and publication are free or owned, and register the pipeline in the state.

        The publication is recorded as owned before it exists. The slot is recorded as owned only if it
        exists: another program may create a slot of this name before this process does.

        Raises SlotError or PublicationError for one that exists and is not the pipeline's own.

        :param last: the epoch of the pipeline's lake, which names slot and publication even if the state was
            lost
        :param replace_record: replace a record of another source, slot or lake; first drop the slot and
            publication that the pipeline owned here under other names
        """
        pipeline = self.pipeline
        known = None if last is None or known_source(last, server).differs(server) else last
        recorded = self.state_db.read_pipeline(pipeline.name)
        ours = None if recorded is None or known_source(recorded, server).differs(server) else recorded
        found = read_slot(self.source, pipeline.slot)
        slot_ours = (
            ours.slot_owned and ours.slot == pipeline.slot
            if ours is not None
            else known is not None and known.slot == pipeline.slot
        )
        reason = None if found is None else reason_to_keep(self.source, found)
        if found is not None and (not slot_ours or reason):
            raise SlotError(
                f"the replication slot {pipeline.slot} exists and was not made by pipeline {pipeline.name!r}"
                f"{f': {reason}' if reason else ''}",
                "set `slot` to a name that is free; or, if no program needs that slot, drop it, which loses"
                " the changes that its reader lacks: SELECT"
                f" pg_drop_replication_slot({quote_literal(pipeline.slot)})",
            )
        found_publication = publication.read_identity(self.source, pipeline.publication)
        creates = pipeline.publication_mode == "create"
        publication_ours = (
            ours.owns(pipeline.publication)
            if ours is not None
            else known is not None
            and found_publication is not None
            and (known.publication, known.publication_oid) == (pipeline.publication, found_publication[0])
        )
        oid = None if known is None else known.publication_oid
        reason = publication.reason_to_keep(self.source, pipeline.publication, pipeline.name, oid)
        if creates and found_publication is not None and (not publication_ours or reason):
            raise PublicationError(
                f"the publication {pipeline.publication} exists and was not made by {pipeline.name!r}"
                f"{f': {reason}' if reason else ''}",
                'set `publication` to a name that is free, or `publication_mode` to "use"; or drop'
                " that publication, if no program needs it: DROP PUBLICATION"
                f" {quote_identifier(pipeline.publication)}",
            )
        if replace_record:
            for text in {_what_stays(former, server) for former in (last, recorded)} - {""}:
                log.warning("%s", text)
            self._drop_former(ours, known)
        self.state_db.register(
            pipeline,
            server.system_identifier,
            # Another program may create a slot of this name while this process waits for open transactions.
            slot_owned=found is not None,
            publication_owned=creates,
            database=server.database,
            database_oid=server.database_oid,
            # Empty until the changelog exists: until then the path identifies the lake.
            lake_id="",
            replace=replace_record,
        )

    def _drop_former(self, recorded: PipelineRecord | None, known: EpochRecord | None) -> None:
        """Drop the slot and publication that the pipeline owned under other names: no record will name
        them."""
        pipeline, former = self.pipeline, recorded or known
        if former is None:
            return
        slot = read_slot(self.source, former.slot) if former.slot != pipeline.slot else None
        is_owned = recorded is None or recorded.slot_owned
        if slot is not None and is_owned and reason_to_keep(self.source, slot) is None:
            drop_slot(self.source, slot.name)
            log.info("dropped slot %s of the previous epoch", slot.name)
        if former.publication == pipeline.publication or not (recorded and recorded.publication_owned):
            return
        oid = None if known is None else known.publication_oid
        kept = publication.reason_to_keep(self.source, former.publication, pipeline.name, oid)
        if kept is None and publication.read_identity(self.source, former.publication) is not None:
            publication.drop_publication(self.source, former.publication, self.pipeline.lock_timeout_s)
            log.info("dropped publication %s of the previous epoch", former.publication)

    def drop_slot(self) -> None:
        """Drop the slot if the pipeline has created it. Raises BusyError while a walsender is reading it."""
        recorded = self.state_db.read_pipeline(self.pipeline.name)
        if recorded is not None and recorded.slot_owned:
            drop_slot(self.source, self.pipeline.slot)
            self.state_db.record_slot(self.pipeline.name, is_owned=False)

    def record_slot(self) -> None:
        """Record that the pipeline has created its slot."""
        self.state_db.record_slot(self.pipeline.name, is_owned=True)

    @contextmanager
    def record_slot_loss(self) -> Iterator[None]:
        """Record that the pipeline has no slot, if the block fails and the slot does not exist any more.

        Another program may create the next slot of this name.
        """
        try:
            yield
        except BaseException:
            with suppress(PgReplError):
                if read_slot(self.source, self.pipeline.slot) is None:
                    self.state_db.record_slot(self.pipeline.name, is_owned=False)
            raise

    def pipeline_id(self) -> str:
        """Return the ID of the pipeline's record in the state.

        Raises StateError if the record was deleted.
        """
        recorded = self.state_db.read_pipeline(self.pipeline.name)
        if recorded is None:
            raise StateError(
                f"pipeline {self.pipeline.name}: another process deleted its record at the same time"
            )
        return recorded.id

    def prepare_publication(self, relations: list[Relation]) -> None:
        """Drop and create the publication, or check that the existing one publishes these tables completely.

        Drops and creates if `publication_mode` is `create`. Raises PublicationError.
        """
        pipeline = self.pipeline
        found = publication.read_publication(self.source, pipeline.publication)
        if pipeline.publication_mode == "create":
            if found is not None:
                publication.drop_publication(self.source, pipeline.publication, pipeline.lock_timeout_s)
            publication.create_publication(
                self.source,
                pipeline.publication,
                relations,
                pipeline.lock_timeout_s,
                made_for=pipeline.name,
            )
            self._made = self.publication_oid()
            return
        if found is None:
            raise PublicationError(
                f"the publication {pipeline.publication} does not exist",
                'create it, or set `publication_mode` to "create"',
            )
        names = [relation.source_table for relation in relations]
        missing = [str(name) for name in names if name not in found.tables]
        if missing:
            raise PublicationError(
                f"the publication {pipeline.publication} lacks {', '.join(missing)}",
                f"ALTER PUBLICATION {quote_identifier(pipeline.publication)} ADD TABLE {', '.join(missing)}",
            )
        if not (found.insert and found.update and found.delete and found.truncate):
            raise PublicationError(
                f"the publication {pipeline.publication} does not publish all of {_ALL_CHANGES}",
                f"ALTER PUBLICATION {quote_identifier(pipeline.publication)}"
                f" SET (publish = '{_ALL_CHANGES}'); {RESNAPSHOT_OF_ALTERED}",
            )

    @contextmanager
    def publication_undone(self) -> Iterator[None]:
        """Drop the publication that the block created, unless `keep_publication` was called.

        Without a key, a published table rejects the application's updates. A failure is logged.
        """
        try:
            yield
        finally:
            if self._made is not None:
                self._drop_made(self._made)

    def keep_publication(self) -> None:
        """Keep the publication that this run created: its epoch has begun."""
        self._made = None

    def _drop_made(self, oid: int) -> None:
        name = self.pipeline.publication
        try:
            # Connect again: the error may come from the other connection.
            with closing(connect(self.dsn, "unpublish")) as source:
                found = publication.read_identity(source, name)
                if found is not None and found[0] == oid:
                    publication.drop_publication(source, name, self.pipeline.lock_timeout_s)
        except PgReplError as error:
            log.warning("publication %s stays: %s; drop it: pgrepl teardown FILE.json", name, error.message)

    def publication_oid(self) -> int:
        found = publication.read_identity(self.source, self.pipeline.publication)
        if found is None:
            raise PublicationError(
                f"the publication {self.pipeline.publication} was dropped by another program", errors.SNAPSHOT
            )
        return found[0]

    def check_publication(self, oid: int) -> None:
        """Raise PublicationError if the epoch's publication no longer exists or was created again."""
        found = publication.read_identity(self.source, self.pipeline.publication)
        if found is None or found[0] != oid:
            fate = "no longer exists" if found is None else "was dropped and created again"
            raise PublicationError(
                f"the publication {self.pipeline.publication} {fate}",
                errors.NEW_EPOCH,
            )

    def publish(self, relations: Sequence[Relation]) -> list[Relation]:
        """Add the tables that the publication lacks, and return them.

        Raises PrivilegeError, PublicationError, also if a publication that is only used or not owned lacks
        tables, and SnapshotError if a table could not be locked. The publication is unchanged then.
        """
        name, is_used = self.pipeline.publication, self.pipeline.publication_mode == "use"
        if not is_used and self.state_db.owns_publication(self.pipeline):
            added = publication.add_tables(self.dsn, name, relations, self.pipeline.lock_timeout_s)
            if added:
                log.info("added to the publication %s: %s", name, ", ".join(str(one.table) for one in added))
            return added
        found = publication.read_publication(self.source, name)
        held = found.tables if found else frozenset()
        names = [relation.source_table for relation in relations]
        missing = ", ".join(str(name) for name in names if name not in held)
        if missing and not is_used:
            raise PublicationError(
                f"the publication {name} lacks {missing}, and was not made by {self.pipeline.name!r}",
                'set `publication_mode` to "use", and ask the owner of the publication to run'
                f" ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {missing}",
            )
        if missing:
            raise PublicationError(
                f"the publication {name} lacks {missing}",
                f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {missing}",
            )
        return []


def _what_stays(former: EpochRecord | PipelineRecord | None, server: Server) -> str:
    """Return a sentence about the slot and publication that a new epoch leaves at another source, or ""."""
    if former is None or not (source := known_source(former, server)).differs(server):
        return ""
    return (
        f"slot {former.slot} and publication {former.publication} of the previous epoch are left in {source}:"
        " drop them there, because the slot retains WAL"
    )


@dataclass(frozen=True)
class NextEpoch:
    """The number of a new epoch.

    `former_lake`: the ID of the lake whose changelog was lost, from the state; empty if the state has none,
    or the changelog exists.
    """

    epoch: Epoch
    former_lake: str = ""


def find_next_epoch(
    state_db: StateDatabase, pipeline: Pipeline, tables: Iterable[TableName], last: EpochRecord | None
) -> NextEpoch:
    """Return the number of the next epoch: 1 above every epoch that the lake records.

    Epochs are recorded in the changelog, the consistent points, the relation index and, if the changelog is
    missing (`last` is None), in the lake tables. A number that is used again would mix records of two epochs.
    Raises LakeError if the points or a table's folder belong to another lake than the state records.
    """
    lake_root = pipeline.lake_root
    former, of_tables = ("", 0) if last is not None else _check_former_tables(state_db, pipeline, tables)
    if last is None:
        _check_former_points(lake_root, former)
    epochs = [point.epoch for point in ConsistentPoints(lake_root).all()]
    of_index = RelationIndex(relations_uri(lake_root)).last_epoch()
    highest = max(0 if last is None else last.epoch, of_tables, of_index, *epochs)
    return NextEpoch(Epoch(highest + 1), former)


def _check_former_tables(
    state_db: StateDatabase, pipeline: Pipeline, tables: Iterable[TableName]
) -> tuple[str, int]:
    """Return the ID of the lost lake, and the highest epoch of a table.

    Raises LakeError as `find_next_epoch`.
    """
    name, root = pipeline.name, pipeline.lake_root
    recorded = state_db.read_pipeline(name)
    is_here = recorded is not None and is_same_place(recorded.lake, root)
    former = recorded.lake_id if recorded is not None and is_here else ""
    records = state_db.read_tables(name) if is_here else {}
    copied = {table for table, record in records.items() if record.position_lsn is not None}
    epochs = [
        check_former(f"{root}/{path}", name, former, is_copied=table in copied)
        for table in tables
        for path in (table.path, history_path(table))
    ]
    return former, max(epochs, default=0)


def _check_former_points(lake_root: str, former: str) -> None:
    uri = points_uri(lake_root)
    lakes = {app for app in read_apps(uri) if app.startswith(LAKE_APP)}
    if lakes and f"{LAKE_APP}{former}" not in lakes:
        raise LakeError(
            f"{uri} holds the consistent points of another lake, and the changelog is missing. Nothing was"
            " changed",
            "restore the folder _pgrepl/changelog of that lake; if it is lost, move the points elsewhere",
        )
