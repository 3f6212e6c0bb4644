"""The printed SQL sets a sequence only if its value is before the recorded one."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.app.sequences import RecordedSequences, to_sql
from airflow_provider_pgrepl.replication.lake.sequences import RecordedValue
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.sequences import Sequence, SequenceValue

LOWEST = -(2**63)
# Value at the server, recorded value, and what nextval returns then.
UP = (
    ((9, True), (5, True), 10),
    ((2, True), (5, True), 6),
    ((5, True), (5, True), 6),
    ((5, True), (5, False), 6),
    ((5, False), (5, True), 6),
    ((1, False), (5, False), 5),
)
DOWN = (
    ((-9, True), (-5, True), -10),
    ((-2, True), (-5, True), -6),
    ((-5, True), (-5, False), -6),
    ((-5, False), (-5, True), -6),
    ((-1, False), (LOWEST, False), LOWEST),
)


def test_no_statement_sets_a_sequence_back(run):
    cases = [(1, *case) for case in UP] + [(-1, *case) for case in DOWN]
    for number, (increment, at_server, recorded, following) in enumerate(cases):
        name = TableName("public", f"{number} kä\n\\one's\"")
        run(f"create sequence {name.sql} increment {increment}")
        run(f"select setval($${name.sql}$$, {at_server[0]}, {at_server[1]})")
        value = SequenceValue(Sequence(name, None, "bigint", increment), *recorded)
        now = datetime.now(UTC)
        run(to_sql(RecordedSequences([RecordedValue(value, 1, LSN(1), now)], 1, LSN(1))))
        found = run(f"select nextval($${name.sql}$$)")
        assert found == [(following,)], (increment, at_server, recorded)
