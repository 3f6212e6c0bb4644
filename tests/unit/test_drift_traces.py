"""drift/: traces that a change leaves in the catalog alone, by the transactions that made it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift import DriftKind
from airflow_provider_pgrepl.replication.drift.judge import DriftResult, judge
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Partition, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

CHOICES = Pipeline(name="p", lake="/lake", tables=("public.*",)).options(TableName("public", "goods"))
BEFORE = Relation(
    oid=7,
    table=TableName("public", "goods"),
    columns=(Column("id", 1, 23, -1, "integer", is_key=True, not_null=True, xmin=10),),
    relfilenode=70,
    publication_oid=5,
    publication_xmin=9,
    membership_oid=50,
    membership_xmin=11,
    natts=1,
)
PART = Partition(71, TableName("public", "goods_1"), 700)


def judged(before: Relation, now: Relation) -> DriftResult:
    return judge(before, RelationRecord.of_catalog(now), CHOICES)


@pytest.mark.parametrize("xmin", [8, 12], ids=["before it in number", "after it in number"])
@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("publication_xmin", "the publication was altered: changes of some kind may be missing"),
        ("membership_xmin", "the column list, row filter or schema of the table in the publication changed"),
    ],
)
def test_publication_altered_by_any_other_transaction_is_drift(field: str, says: str, xmin: int) -> None:
    """Numbers of transactions wrap around, so a later one may have a lower number."""
    now = replace(BEFORE, **{field: xmin})
    assert judged(BEFORE, now).reason == says
    assert (
        judge(BEFORE, RelationRecord.of_publication_status(7, now.publication_status), CHOICES).reason == says
    )


def test_only_the_truncate_that_the_stream_sent_explains_another_file() -> None:
    before = replace(BEFORE, relkind="p", relfilenode=0, partitions=(PART,), truncated_by=12)
    truncated = replace(before, partitions=(replace(PART, relfilenode=701, xmin=12),))
    assert judged(before, truncated).kind is DriftKind.UNCHANGED
    later = replace(before, partitions=(replace(PART, relfilenode=702, xmin=13),))
    assert judged(before, later).reason == (
        "partition public.goods_1 was truncated by itself, or rewritten as VACUUM FULL does"
    )
