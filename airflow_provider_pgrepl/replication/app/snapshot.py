"""The snapshot app: begins an epoch, or takes single tables, and copies them at one source snapshot."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import ChangelogError, ConfigError, LakeError, SnapshotError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.claims import Claims
from airflow_provider_pgrepl.replication.changelog import reader, writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.session import build_session
from airflow_provider_pgrepl.replication.lake.snapshot import SnapshotCopy
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source import catalog, slot, snapshot
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.preflight import check_source
from airflow_provider_pgrepl.replication.source.table_warnings import table_warnings
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState

log = logging.getLogger(__name__)

_DONE_STATES = (TableState.STREAMING, TableState.CATCHING_UP, TableState.PAUSED)
_SNAPSHOT_ATTEMPTS = 3


def main(argv: Sequence[str]) -> int:
    """Run the app; returns its exit code."""
    return process.run("snapshot", argv, _add_arguments, _run)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", metavar="a.b,c.d", help="take these tables (anew), and no others")
    parser.add_argument(
        "--new-epoch", action="store_true", help="begin a new history: new slot, all tables taken anew"
    )


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    dsn = process.source_dsn()
    chosen = _parse_tables(arguments.tables)
    if chosen and arguments.new_epoch:
        raise ConfigError("--tables and --new-epoch do not go together: a new epoch takes all tables anew")
    check_source(dsn, pipeline, new_epoch=arguments.new_epoch)
    source = connect(dsn, f"snapshot {pipeline.name}")
    try:
        with Store(process.state_dsn(), f"snapshot {pipeline.name}") as store:
            store.migrate()
            store.lock(pipeline.name, "snapshot")
            return Snapshot(dsn, source, pipeline, store).run(chosen, new_epoch=arguments.new_epoch)
    finally:
        source.close()


def _parse_tables(text: str | None) -> list[TableName]:
    try:
        return [TableName.parse(name.strip()) for name in (text or "").split(",") if name.strip()]
    except ValueError as error:
        raise ConfigError(f"--tables: {error}") from None


def check_owner(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raises LakeError when the lake is another pipeline's."""
    if record.pipeline != pipeline.name:
        raise LakeError(
            f"the lake {pipeline.lake_root} belongs to the pipeline {record.pipeline!r}",
            f"give {pipeline.name!r} a lake root of its own",
        )


@dataclass
class Snapshot:
    """One run of the app."""

    dsn: str
    source: Connection
    pipeline: Pipeline
    store: Store

    def run(self, chosen: list[TableName], *, new_epoch: bool) -> int:
        """Copy what is to be copied; the exit code says whether every table made it."""
        record = self._read_record()
        relations = catalog.resolve_tables(self.source, self.pipeline)
        self._retire_others(relations)
        selected = self._select(relations, chosen, record, new_epoch=new_epoch)
        if not selected:
            log.info("nothing to do: every table has been taken already")
            return process.DONE
        if new_epoch or record is None or not self._has_committed(record):
            if chosen:
                raise ConfigError("--tables: this pipeline has no epoch yet", "run it without --tables first")
            return self._begin_epoch(relations, record)
        return self._take_more(selected, record)

    def _retire_others(self, relations: list[Relation]) -> None:
        """Tables that the configuration no longer holds stop here; what is in the lake of them stays."""
        kept = {relation.table for relation in relations}
        for table, record in self.store.read_tables(self.pipeline.name).items():
            if table not in kept and record.state is not TableState.REMOVED:
                self.store.set_state(self.pipeline.name, table, TableState.REMOVED)
                log.info("table %s is no longer in the pipeline; its lake table stays as it is", table)

    def _read_record(self) -> EpochRecord | None:
        try:
            record = reader.read_epoch(changelog_uri(self.pipeline.lake_root))
        except ChangelogError as error:
            if "no changelog" not in error.message:
                raise
            return None
        check_owner(self.pipeline, record)
        return record

    def _select(
        self,
        relations: list[Relation],
        chosen: list[TableName],
        record: EpochRecord | None,
        *,
        new_epoch: bool,
    ) -> list[Relation]:
        known = {relation.table: relation for relation in relations}
        strangers = [str(table) for table in chosen if table not in known]
        if strangers:
            raise ConfigError(
                f"--tables: {', '.join(strangers)} is not among the tables of the pipeline",
                "add it to `tables` in the pipeline file",
            )
        if chosen:
            return [known[table] for table in chosen]
        if new_epoch or record is None:
            return relations
        states = self.store.read_tables(self.pipeline.name)
        return [
            relation
            for relation in relations
            if relation.table not in states or states[relation.table].state not in _DONE_STATES
        ]

    def _has_committed(self, record: EpochRecord) -> bool:
        """Whether any table of this epoch is in the lake; before that, the epoch can be begun again."""
        states = self.store.read_tables(self.pipeline.name).values()
        return any(
            state.position_lsn is not None and state.position_lsn >= record.consistent_point - 1
            for state in states
        )

    # A new epoch: publication, slot, changelog.

    def _begin_epoch(self, relations: list[Relation], last: EpochRecord | None) -> int:
        pipeline, server = self.pipeline, catalog.read_server(self.source)
        claims = Claims(self.source, pipeline, self.store)
        claims.claim(server, replace=last is not None)
        # First, because it refuses while the slot is read: nothing may be altered under a running app.
        slot.drop_slot(self.source, pipeline.slot)
        claims.prepare_publication(relations)
        for attempt in range(1, _SNAPSHOT_ATTEMPTS + 1):
            slot.drop_slot(self.source, pipeline.slot)
            exported = slot.export_slot(
                self.dsn, pipeline.slot, temporary=False, timeout_s=pipeline.slot_timeout_s
            )
            try:
                with exported, self._keep(exported, relations) as keeper:
                    exported.close()
                    record = EpochRecord(
                        pipeline.name,
                        Epoch(last.epoch + 1 if last else 1),
                        server.system_identifier,
                        server.timeline,
                        pipeline.slot,
                        pipeline.publication,
                        claims.publication_oid(),
                        exported.consistent_point,
                    )
                    self._open_epoch(record, last)
                    last = record
                    return self._copy(keeper, exported, record, begins_epoch=True)
            except SnapshotError as error:
                if attempt == _SNAPSHOT_ATTEMPTS:
                    slot.drop_slot(self.source, pipeline.slot)
                    raise
                log.warning("the snapshot cannot be used, taking another: %s", error.message)
        raise AssertionError("unreachable")

    def _open_epoch(self, record: EpochRecord, last: EpochRecord | None) -> None:
        uri = changelog_uri(self.pipeline.lake_root)
        try:
            if last is None:
                writer.create_changelog(uri, record)
            else:
                writer.begin_epoch(uri, record)
        except BaseException:
            # A slot that no changelog goes with would hold the source's WAL for nobody.
            slot.drop_slot(self.source, self.pipeline.slot)
            raise
        log.info("epoch %d begins at %s", record.epoch, record.consistent_point)

    # More tables of an epoch that runs: a temporary slot's snapshot.

    def _take_more(self, relations: list[Relation], record: EpochRecord) -> int:
        pipeline = self.pipeline
        Claims(self.source, pipeline, self.store).publish(relations)
        name = f"pgrepl_tmp_{self.source.info.backend_pid}"
        for attempt in range(1, _SNAPSHOT_ATTEMPTS + 1):
            exported = slot.export_slot(self.dsn, name, temporary=True, timeout_s=pipeline.slot_timeout_s)
            try:
                with exported, self._keep(exported, relations) as keeper:
                    exported.close()
                    return self._copy(keeper, exported, record)
            except SnapshotError as error:
                if attempt == _SNAPSHOT_ATTEMPTS:
                    raise
                log.warning("the snapshot cannot be used, taking another: %s", error.message)
        raise AssertionError("unreachable")

    def _keep(self, exported: slot.ExportedSnapshot, relations: list[Relation]) -> snapshot.Keeper:
        return snapshot.keep(
            self.dsn, exported.snapshot, relations, self.pipeline.publication, self.pipeline.lock_timeout_s
        )

    def _copy(
        self,
        keeper: snapshot.Keeper,
        exported: slot.ExportedSnapshot,
        record: EpochRecord,
        *,
        begins_epoch: bool = False,
    ) -> int:
        for warning in table_warnings(keeper.relations, self.pipeline):
            log.warning("%s", warning)
        spark = build_session(f"pgrepl snapshot {self.pipeline.name}", delta=False)
        try:
            copy = SnapshotCopy(spark, self.dsn, self.pipeline, self.store, record, keeper, exported)
            failed = copy.run()
            if begins_epoch:
                copy.write_point()
        finally:
            spark.stop()
        writer.mark(changelog_uri(self.pipeline.lake_root))
        if failed:
            log.error(
                "%d of %d tables are in error: %s", len(failed), len(keeper.relations), ", ".join(failed)
            )
            return process.WILL_NOT_HELP
        return process.DONE
