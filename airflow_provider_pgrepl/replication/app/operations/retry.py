"""Whether a table that stopped can go on from where it stands, without a new copy."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ChangelogError, DriftError, LakeTableError, PgReplError
from airflow_provider_pgrepl.replication.app.operations.chosen_tables import raise_all
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.gaps import check_no_gap
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    open_changelog,
    read_durable_lsn,
    read_floor_lsn,
)
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.drift.judge import Verdict, judge_catalog
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.lake.apply.table_position import read_table_position
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, app_id, no_position, open_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.continuity import check_publication
from airflow_provider_pgrepl.replication.settings.copied_choices import copied_choices
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.preflight.tables import right_problems
from airflow_provider_pgrepl.replication.state.tables import TableRecord
from airflow_provider_pgrepl.replication.values import lake_schema


@dataclass
class Continuation:
    """What source and lake have for tables that are to go on. One look at the changelog serves them all."""

    source: Connection
    pipeline: Pipeline
    epoch: EpochRecord
    floor: LSN
    changelog: DeltaTable = field(repr=False)
    _points: Points = field(repr=False)
    _index: RelationIndex = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._index = RelationIndex(relations_uri(self.pipeline.lake_root))

    @classmethod
    def open(cls, source: Connection, pipeline: Pipeline) -> Continuation:
        """Raises ChangelogError, LakeError; PublicationError when the publication has a gap."""
        points = Points(pipeline.lake_root)
        if pipeline.has_lake_tables:
            # Before the changelog, which then has all that they know of: an app that runs makes more.
            points.check_lake()
        changelog = open_changelog(changelog_uri(pipeline.lake_root))
        own_tables.check(pipeline.lake_root)
        epoch = EpochRecord.from_json(changelog.metadata().description)
        check_publication(source, epoch.publication, epoch.publication_oid)
        return cls(source, pipeline, epoch, read_floor_lsn(changelog, epoch.epoch), changelog, points)

    def check(self, record: TableRecord) -> Relation:
        """What the lake table is for now.

        Raises LakeTableError without a copy of this epoch, ChangelogError when changes that it needs are no
        longer kept, GapError when a transaction among them was skipped, DriftError when it is not what the
        source has, or was sent what it cannot follow, PrivilegeError when the source cannot be read.
        """
        relation = self._relation_in_lake(record)
        publication = self.epoch.publication
        current = read_relation(self.source, relation.oid, publication) or find_relation(
            self.source, relation.table, publication
        )
        copied = copied_choices(self.pipeline, record.config, record.table)
        verdict = judge_catalog(relation, current, copied)
        if verdict.kind is Kind.UNSAFE:
            hint, remedy = verdict.hint, verdict.remedy
            if _needs_copy(record) and not _needs_copy(verdict):
                hint, remedy = record.hint, record.remedy
            raise DriftError(f"{record.table}: {verdict.reason}", hint, remedy)
        if _needs_copy(record):
            raise DriftError(f"{record.table}: {record.reason}", record.hint, record.remedy)
        assert current is not None  # a table that is gone is unsafe
        raise_all(list(right_problems(self.source, [current])))
        return relation

    def _relation_in_lake(self, record: TableRecord) -> Relation:
        hint = hints.resnapshot(record.table)
        if record.relation is None or record.position_lsn is None:
            raise LakeTableError(f"{record.table}: was never copied as a whole", hint)
        if not self.pipeline.has_lake_tables:
            return self._relation_in_changelog(record, record.relation, record.position_lsn)
        table = open_table(f"{self.pipeline.lake_root}/{record.table.path}")
        point = self._points.last_of(record.table, self.epoch.epoch)
        app = app_id(self.pipeline.name, self.epoch.epoch)
        standing = read_table_position(table, app, str(record.table), point)
        if standing is None:
            raise LakeTableError(f"{record.table}: {no_position(table)}", hint)
        problem = standing.problem(record.position_lsn, self.floor, read_durable_lsn(self.changelog))
        if problem is not None:
            raise type(problem)(f"{record.table}: {problem.message}", hint)
        check_no_gap(self.changelog, self.epoch.epoch, record.table, record.relation.oid, standing.whole)
        received = self._index.find(record.relation.oid, app_version(table, RELATION_APP) or 0)
        return received.catalog if received and received.catalog else record.relation

    def _relation_in_changelog(self, record: TableRecord, relation: Relation, position: LSN) -> Relation:
        """What the watch goes on with."""
        if position < self.floor:
            raise ChangelogError(
                f"{record.table}: changes after {position} are no longer kept", hints.resnapshot(record.table)
            )
        check_no_gap(self.changelog, self.epoch.epoch, record.table, relation.oid, position)
        return relation

    def choices(self, record: TableRecord, relation: Relation) -> str | None:
        """The pipeline file as it is now, if the table is one that it would have made; else None."""
        if record.config is None:
            return None
        now = self.pipeline.choices(relation.table)
        try:
            before = Pipeline.from_json(record.config).choices(relation.table)
        except PgReplError:
            return None
        if before.policy.history != now.policy.history:
            return None
        if before.policy.partition != now.policy.partition:
            return None
        if lake_schema(relation, before) != lake_schema(relation, now):
            return None
        return self.pipeline.to_json()


def _needs_copy(known: TableRecord | Verdict) -> bool:
    """Whether nothing else helps. It may have stopped at what the stream has sent, which is there still,
    whatever the catalog shows."""
    return known.remedy is not None and not known.remedy.allows_retry
