"""Drift: whether a relation is still what its lake table was built for. Pure.

A relation is compared with its message and with the catalog as it was when that arrived. The catalog may have
moved on by then: what it has that the message lacks is left for later where that is certain, and stops the
table where it is not. So a table may stop early, never late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import Remedy
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.column_matching import UnclearLayoutError, place_columns
from airflow_provider_pgrepl.replication.drift.columns import ColumnJudge
from airflow_provider_pgrepl.replication.drift.files import file_findings, new_partitions, place_findings
from airflow_provider_pgrepl.replication.drift.following import Following, lake_findings, policy_findings
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.drift.remedy import DriftFinding
from airflow_provider_pgrepl.replication.drift.table_drift import (
    key_findings,
    standing_findings,
    table_findings,
)
from airflow_provider_pgrepl.replication.postgres.relation import PublicationStanding, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableChoices


@dataclass(frozen=True)
class Verdict:
    """What became of a relation, in sentences, and what is to be done.

    `relation`: what the lake table is for from here on, with what it keeps of dropped columns and leaves out
    of added ones; None when the verdict is unsafe. `remedy`: how to go on then; `hint`: the same in words.
    """

    kind: Kind
    changes: tuple[str, ...] = ()
    hint: str = ""
    relation: Relation | None = None
    remedy: Remedy | None = None

    @property
    def reason(self) -> str:
        return "; ".join(self.changes)


def judge(recorded: Relation, received: RelationRecord, choices: TableChoices) -> Verdict:
    """Whether the lake table built for `recorded` can go on with what was received, and how.

    `Verdict.relation` has its columns in the order of the message's, because rows are laid out by it. It is
    the catalog's where that agrees and nothing is kept of dropped columns or left out.
    """
    return _judge(recorded, received, choices, was_sent=True)


def judge_catalog(recorded: Relation, current: Relation | None, choices: TableChoices) -> Verdict:
    """The same for the catalog as it is now, whatever the stream has sent; None: the table is gone."""
    received = RelationRecord.of_catalog(current if current is not None else recorded)
    if current is None:
        received = RelationRecord(received.message, None)
    return _judge(recorded, received, choices, was_sent=False)


def _judge(recorded: Relation, received: RelationRecord, choices: TableChoices, *, was_sent: bool) -> Verdict:
    if received.standing is not None:
        return _judge_standing(recorded, received.standing)
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
    columns = ColumnJudge(recorded, current, choices)
    rewritten = _is_rewritten(recorded, current)
    findings = [
        *columns.findings(places),
        *columns.hidden_findings(places, received.hidden),
        *key_findings(recorded, received, current, places),
        *columns.rewrite_findings(places, rewritten=rewritten),
        *place_findings(recorded, current.standing),
        *file_findings(recorded, current, was_watched=received.watched),
    ]
    if findings:
        return _unsafe(recorded, findings, was_sent=was_sent)
    following = Following(columns, places)
    findings = list(policy_findings(following, received))
    relation = following.relation(received)
    changes = tuple(following.changes)
    if changes and not findings:
        findings = list(lake_findings(recorded, relation, choices))
    if findings:
        return _unsafe(recorded, findings, was_sent=was_sent)
    return Verdict(Kind.SAFE if changes else Kind.UNCHANGED, changes, relation=relation)


def _judge_standing(recorded: Relation, standing: PublicationStanding) -> Verdict:
    findings = list(standing_findings(recorded, standing))
    if standing.oid == recorded.oid and standing.persistence:
        findings += place_findings(recorded, standing)
    if findings:
        return _unsafe(recorded, findings, was_sent=True)
    return Verdict(Kind.UNCHANGED, relation=recorded)


def _unsafe(recorded: Relation, findings: Iterable[DriftFinding], *, was_sent: bool) -> Verdict:
    findings = list(findings)
    changes = tuple(dict.fromkeys(finding.text for finding in findings))
    hardest = _hardest(findings)
    hint, remedy = hardest.hint(recorded.table, was_sent=was_sent), hardest.way_out(was_sent=was_sent)
    return Verdict(Kind.UNSAFE, changes, hint, remedy=remedy)


def _hardest(findings: list[DriftFinding]) -> DriftFinding:
    """The one whose way out helps with all of them. Resnapshotting a table does, where it has its name."""
    by_remedy = {finding.remedy: finding for finding in findings}
    if len(by_remedy) == 1:
        return findings[0]
    harder = (by_remedy.get(remedy) for remedy in (Remedy.MOVED, Remedy.PUBLISH, Remedy.LOGGED))
    return next(filter(None, harder), DriftFinding(""))


def _is_rewritten(recorded: Relation, current: Relation) -> bool:
    """Whether the table or a partition has another file, or one that does not tell of older rows."""
    partitions = (*recorded.partitions, *new_partitions(recorded, current))
    before = {part.oid: part.relfilenode for part in partitions}
    now = {part.oid: part.relfilenode for part in current.partitions}
    pairs = [(recorded.relfilenode, current.relfilenode), *((before[oid], now.get(oid, 0)) for oid in before)]
    return any(files < 0 or (0 not in (was, files) and abs(was) != files) for was, files in pairs)
