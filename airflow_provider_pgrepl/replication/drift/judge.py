"""The comparison of a relation with the one that its lake table was built for. No side effects.

A relation is compared in its message and in the catalog as of when the message arrived. The catalog may be
ahead of the stream. A change that the message lacks is postponed if it certainly came later; otherwise it
stops the table. So a table may stop early, but never late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.columns import ColumnComparison, DriftFinding
from airflow_provider_pgrepl.replication.drift.files import file_findings, new_partitions, place_findings
from airflow_provider_pgrepl.replication.drift.following import SafeDrift, lake_findings, policy_findings
from airflow_provider_pgrepl.replication.drift.kind import DriftKind
from airflow_provider_pgrepl.replication.drift.matching import (
    MatchedColumn,
    UnclearLayoutError,
    place_columns,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStatus, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions

MADE_AGAIN = (
    "the table was dropped and another was created with its name; the lake has the rows of the dropped one"
)

NO_IDENTITY = (
    "the table has no replica identity any more, so the source refuses UPDATE and DELETE on it while it is"
    " published. Give it a primary key, or an identity by REPLICA IDENTITY USING INDEX or FULL, or take it"
    " out of the publication"
)


def table_findings(recorded: Relation, received: RelationRecord, current: Relation) -> Iterator[DriftFinding]:
    """Yield the reasons, other than its columns, why the lake table cannot continue."""
    message = received.message
    if not recorded.oid == current.oid == message.oid:
        yield DriftFinding(MADE_AGAIN)
        return
    name = TableName(message.schema, message.name)
    # A table that was renamed and then renamed back has been the same table all the time.
    if recorded.table not in (name, current.table):
        yield DriftFinding(f"the table was renamed or moved to {name}", Remedy.MOVED, name)
    if current.relkind != recorded.relkind:
        yield DriftFinding("the table became another kind of relation")
    if message.replica_identity != recorded.replica_identity:
        yield DriftFinding("the replica identity changed", Remedy.UNDO)
    yield from _publication_findings(recorded, current.publication_status)


def publication_status_findings(recorded: Relation, status: PublicationStatus) -> Iterator[DriftFinding]:
    """Yield the reasons why a table cannot continue whatever its present definition is: changes may be
    missing."""
    if status.oid == 0:
        yield DriftFinding("the table was dropped", Remedy.GONE)
    elif status.oid != recorded.oid:
        yield DriftFinding(MADE_AGAIN)
    elif status.moved_to not in (None, recorded.table):
        text = f"the table was renamed or moved to {status.moved_to}, and another one has its name"
        yield DriftFinding(text, moved_to=status.moved_to)
    else:
        yield from _publication_findings(recorded, status)


def _publication_findings(recorded: Relation, current: PublicationStatus) -> Iterator[DriftFinding]:
    if _differ(recorded.publication_oid, current.publication_oid):
        yield DriftFinding("the publication was dropped, or created again: changes between are missing")
    elif _differ(recorded.membership_oid, current.membership_oid):
        if current.membership_oid:
            text = "the table was removed from the publication and added again: changes are missing"
            yield DriftFinding(text)
        else:
            yield DriftFinding("the table was taken out of the publication", Remedy.PUBLISH)
    elif _differ(recorded.publication_xmin, current.publication_xmin):
        yield DriftFinding("the publication was altered: changes of some kind may be missing")
    elif _differ(recorded.membership_xmin, current.membership_xmin):
        yield DriftFinding("the column list, row filter or schema of the table in the publication changed")
    elif recorded.links and recorded.links != current.links:
        yield DriftFinding(
            "the table was detached from the one through which it is published, and attached again: changes"
            " between are missing"
        )


def _differ(recorded: int, current: int) -> bool:
    return recorded not in (0, current)


def key_findings(
    recorded: Relation, received: RelationRecord, current: Relation, places: list[MatchedColumn]
) -> Iterator[DriftFinding]:
    """Yield the columns that joined or left the key, including those that were dropped.

    With REPLICA IDENTITY FULL the stream marks every column, so the catalog's key is used. A key that is
    published only in part is not a key of the lake's, although the stream marks it.
    """
    before = {column.attnum for column in recorded.key_columns}
    now = {column.attnum for column in current.key_columns}
    if received.message.replica_identity != "f" and (before or now):
        now = {place.attnum for place in places if place.sent.is_identity}
    for place in places:
        if (place.attnum in before) != (place.attnum in now):
            verb = "left" if place.attnum in before else "joined"
            yield DriftFinding(f"the key changed: column {place.shown} {verb} it", Remedy.UNDO)
    for gone in sorted(before - {place.attnum for place in places}):
        (column,) = (column for column in recorded.columns if column.attnum == gone)
        yield DriftFinding(f"the key changed: column {show_identifier(column.name)} was dropped")
    if before and not now and received.message.replica_identity != "f":
        yield DriftFinding(NO_IDENTITY, Remedy.UNDO)


@dataclass(frozen=True)
class DriftResult:
    """The result of a comparison: the changes, as sentences, and the remedy.

    `relation`: the relation of the lake table from here on, including the dropped columns that it keeps and
    the added columns that it leaves out; None if the result is unsafe. `remedy`: how to recover if it is
    unsafe; `hint`: the same as an instruction.
    """

    kind: DriftKind
    changes: tuple[str, ...] = ()
    hint: str = ""
    relation: Relation | None = None
    remedy: Remedy | None = None

    @property
    def reason(self) -> str:
        return "; ".join(self.changes)


def judge(recorded: Relation, received: RelationRecord, options: TableOptions) -> DriftResult:
    """Compare a received relation with the one that the lake table was built for.

    `DriftResult.relation` has its columns in the order of the message, which is the order of values in rows.
    It equals the catalog's relation if that agrees, and no dropped columns are kept and none are left out.
    """
    return _judge(recorded, received, options, was_sent=True)


def compare_catalog(recorded: Relation, current: Relation | None, options: TableOptions) -> DriftResult:
    """Compare the present catalog, without regard to the stream. `current` None: the table no longer
    exists."""
    received = RelationRecord.of_catalog(current if current is not None else recorded)
    if current is None:
        received = RelationRecord(received.message, None)
    return _judge(recorded, received, options, was_sent=False)


def _judge(
    recorded: Relation, received: RelationRecord, options: TableOptions, *, was_sent: bool
) -> DriftResult:
    if received.publication_status is not None:
        return _judge_publication_status(recorded, received.publication_status)
    current = received.catalog
    if current is None:
        findings = [DriftFinding("the table was dropped", Remedy.GONE)]
        return _unsafe(recorded, findings, was_sent=was_sent)
    if findings := list(table_findings(recorded, received, current)):
        return _unsafe(recorded, findings, was_sent=was_sent)
    try:
        places = place_columns(recorded, received, current)
    except UnclearLayoutError as unclear:
        return _unsafe(recorded, [DriftFinding(str(unclear))], was_sent=was_sent)
    columns = ColumnComparison(recorded, current, options)
    rewritten = _is_rewritten(recorded, current)
    findings = [
        *columns.findings(places),
        *columns.hidden_findings(places, received.hidden),
        *key_findings(recorded, received, current, places),
        *columns.rewrite_findings(places, rewritten=rewritten),
        *place_findings(recorded, current.publication_status),
        *file_findings(recorded, current, was_watched=received.watched),
    ]
    if findings:
        return _unsafe(recorded, findings, was_sent=was_sent)
    following = SafeDrift(columns, places)
    findings = list(policy_findings(following, received))
    relation = following.relation(received)
    changes = tuple(following.changes)
    if changes and not findings:
        findings = list(lake_findings(recorded, relation, options))
    if findings:
        return _unsafe(recorded, findings, was_sent=was_sent)
    return DriftResult(DriftKind.SAFE if changes else DriftKind.UNCHANGED, changes, relation=relation)


def _judge_publication_status(recorded: Relation, status: PublicationStatus) -> DriftResult:
    findings = list(publication_status_findings(recorded, status))
    if status.oid == recorded.oid and status.persistence:
        findings += place_findings(recorded, status)
    if findings:
        return _unsafe(recorded, findings, was_sent=True)
    return DriftResult(DriftKind.UNCHANGED, relation=recorded)


def _unsafe(recorded: Relation, findings: Iterable[DriftFinding], *, was_sent: bool) -> DriftResult:
    findings = list(findings)
    changes = tuple(dict.fromkeys(finding.text for finding in findings))
    hardest = _hardest(findings)
    hint, remedy = hardest.hint(recorded.table, was_sent=was_sent), hardest.way_out(was_sent=was_sent)
    return DriftResult(DriftKind.UNSAFE, changes, hint, remedy=remedy)


def _hardest(findings: list[DriftFinding]) -> DriftFinding:
    """Return the finding whose remedy helps with all of them. A resnapshot of the table does, if the table
    has kept its name."""
    by_remedy = {finding.remedy: finding for finding in findings}
    if len(by_remedy) == 1:
        return findings[0]
    harder = (by_remedy.get(remedy) for remedy in (Remedy.MOVED, Remedy.PUBLISH, Remedy.LOGGED))
    return next(filter(None, harder), DriftFinding(""))


def _is_rewritten(recorded: Relation, current: Relation) -> bool:
    """Return True if the table or a partition has another file, or one that does not show the values of older
    rows."""
    partitions = (*recorded.partitions, *new_partitions(recorded, current))
    before = {part.oid: part.relfilenode for part in partitions}
    now = {part.oid: part.relfilenode for part in current.partitions}
    pairs = [(recorded.relfilenode, current.relfilenode), *((before[oid], now.get(oid, 0)) for oid in before)]
    return any(files < 0 or (0 not in (was, files) and abs(was) != files) for was, files in pairs)
