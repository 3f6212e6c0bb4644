"""The comparison of a relation with the one that its lake table was built for, and the table's response to
safe drift. No side effects.

A relation is compared in its message and in the catalog as of when the message arrived. The catalog may be
ahead of the stream. A change that the message lacks is postponed if it certainly came later; otherwise it
stops the table. So a table may stop early, but never late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.errors import ConfigError, Remedy, TableError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Column, PublicationStatus, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import CHANGE_IT, lake_schema, option_problems, partitioning

from . import DriftKind
from .columns import ColumnComparison, DriftFinding, is_of_other_type, type_change
from .files import file_findings, new_partitions, place_findings
from .matching import MatchedColumn, UnclearLayoutError, highest_attnum, place_columns, unknown_attnums

MADE_AGAIN = (
    "the table was dropped and another was created with its name; the lake has the rows of the dropped one"
)

NO_IDENTITY = (
    "the table has no replica identity any more, so the source refuses UPDATE and DELETE on it while it is"
    " published. Give it a primary key, or an identity by REPLICA IDENTITY USING INDEX or FULL, or take it"
    " out of the publication"
)


def table_findings(
    recorded: Relation, received: RelationRecord, current: Relation, *, follows: bool = False
) -> Iterator[DriftFinding]:
    """Yield the reasons, other than its columns, why the lake table cannot continue.

    `follows`: a renamed table is followed, so that one with another name took the place of another table.
    """
    message = received.message
    if not recorded.oid == current.oid == message.oid:
        yield DriftFinding(MADE_AGAIN)
        return
    name = TableName(message.schema, message.name)
    # A table that was renamed and then renamed back has been the same table all the time.
    if recorded.table not in (name, current.table):
        remedy = Remedy.RESNAPSHOT if follows else Remedy.MOVED
        yield DriftFinding(f"the table was renamed or moved to {name}", remedy, name)
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
class _SafeDrift:
    """A safe drift: the changes that are in effect for the rows after the received relation."""

    judge: ColumnComparison
    places: list[MatchedColumn]

    @property
    def changes(self) -> Iterator[str]:
        """Yield a sentence for each column that was dropped, retyped or added."""
        for column in self._dropped():
            yield f"column {show_identifier(column.name)} was dropped"
        for before, now in self.retyped():
            yield type_change(before, now)
        left_out = " and is left out" if self._leaves_out else ""
        for column in self._added():
            yield f"column {show_identifier(column.name)} was added{left_out}"

    def retyped(self) -> Iterator[tuple[Column, Column]]:
        """Yield the columns, before and now, whose type is another one in the next rows."""
        for place in self.places:
            if place.before is not None and is_of_other_type(place.before, self._column(place)):
                yield place.before, self._column(place)
        now = {column.attnum: column for column in self.judge.current.unpublished}
        for column in self.judge.recorded.unpublished:
            if column.attnum in now and is_of_other_type(column, now[column.attnum]):
                yield column, now[column.attnum]

    def _added(self) -> Iterator[Column]:
        yield from (place.column for place in self.places if place.before is None)
        known = {column.attnum for column in self.judge.recorded.unpublished}
        yield from (column for column in self.judge.current.unpublished if column.attnum not in known)

    def _dropped(self) -> Iterator[Column]:
        recorded = self.judge.recorded
        live = {place.attnum for place in self.places}
        live |= {column.attnum for column in self.judge.current.unpublished}
        for column in (*recorded.columns, *recorded.unpublished):
            if column.attnum not in live:
                yield column

    @property
    def _leaves_out(self) -> bool:
        return self.judge.options.policy.on_drift == "ignore"

    def _column(self, place: MatchedColumn) -> Column:
        """Return the column as the next rows have it: with the lake's name, and of the type that was sent."""
        before, now, sent = place.before, place.now, place.sent
        if before is None:
            return replace(place.column, is_key=sent.is_identity and place.column.is_key)
        if now is None or (now.type_oid, now.typmod) != (sent.type_oid, sent.typmod):
            return before
        name = before.name if self.judge.in_lake(before) else sent.name
        return replace(now, name=name, is_key=before.is_key)

    def relation(self, received: RelationRecord) -> Relation:
        """Return the relation of the lake table for the next rows; it equals the catalog's if nothing is
        different."""
        recorded, current = self.judge.recorded, self.judge.current
        columns = tuple(self._column(place) for place in self.places)
        dropped = (column for column in self._dropped() if self.judge.in_lake(column))
        live = {column.attnum for column in (*columns, *current.unpublished)}
        ignored = {attnum for attnum in recorded.ignored if attnum in live}
        if self._leaves_out:
            ignored |= {column.attnum for column in self._added()}
        ignored |= set(self._renamed_and_left_out())
        if current.table != recorded.table:
            # The stream has not sent the new name yet.
            current = replace(current, table=recorded.table, renamed_to=recorded.renamed_to)
        return replace(
            current,
            columns=columns,
            replica_identity=received.message.replica_identity,
            natts=self._natts(received, columns),
            dropped=tuple(sorted((*recorded.dropped, *dropped), key=lambda column: column.attnum)),
            ignored=tuple(sorted(ignored)),
        )

    def _renamed_and_left_out(self) -> Iterator[int]:
        """Yield the attnums of renamed columns that the lake leaves out by their earlier names, and from here
        on by attnum."""
        for place in self.places:
            before = place.before
            if before is not None and place.sent.name != before.name and not self.judge.in_lake(before):
                yield before.attnum

    def _natts(self, received: RelationRecord, columns: tuple[Column, ...]) -> int:
        """Return the highest attnum up to which every column is known.

        It stays below the attnums of columns that were added and dropped unseen: if the catalog is ahead of
        the stream, rows of these columns may still arrive.
        """
        recorded, current = self.judge.recorded, self.judge.current
        if received.same_columns and not unknown_attnums(recorded, current):
            return current.natts
        return max((highest_attnum(recorded), *(column.attnum for column in columns)))


def _policy_findings(following: _SafeDrift, received: RelationRecord) -> Iterator[DriftFinding]:
    """Yield the changes that the lake must not follow: because of the policy, or because a type was changed
    with USING."""
    if received.using:
        for before, now in following.retyped():
            yield DriftFinding(f"{type_change(before, now)} by an expression of its own (USING)")
    judge = following.judge
    if judge.options.policy.on_drift == "error":
        for change in following.changes:
            yield DriftFinding(change, Remedy.POLICY)


def _lake_findings(recorded: Relation, relation: Relation, options: TableOptions) -> Iterator[DriftFinding]:
    """Yield the reasons why the lake cannot hold this relation, except problems that `recorded` already
    had."""
    try:
        partitioning(relation, options)
    except TableError as error:
        yield DriftFinding(f"{error.message}: {CHANGE_IT}")
        return
    try:
        lake_schema(relation, options)
    except (TableError, ConfigError) as error:
        yield DriftFinding(f"{error.message} ({error.hint})", Remedy.CHOICE)
        return
    known = set(option_problems(_with_dropped(recorded), options))
    for problem in option_problems(_with_dropped(relation), options):
        if problem not in known:
            yield DriftFinding(problem, Remedy.CHOICE)


def _with_dropped(relation: Relation) -> Relation:
    """Return the relation with its dropped columns as unpublished ones: the lake table still has them, so
    that options may name them."""
    return replace(relation, unpublished=(*relation.unpublished, *relation.dropped))


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
    follows = options.policy.on_rename == "follow"
    if findings := list(table_findings(recorded, received, current, follows=follows)):
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
    following = _SafeDrift(columns, places)
    findings = list(_policy_findings(following, received))
    relation = following.relation(received)
    changes = tuple(following.changes)
    if changes and not findings:
        findings = list(_lake_findings(recorded, relation, options))
    if findings:
        return _unsafe(recorded, findings, was_sent=was_sent)
    if relation.source_table != recorded.source_table:
        changes += (f"the table was renamed or moved to {relation.source_table}",)
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
