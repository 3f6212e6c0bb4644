"""The relation index keeps what the changelog's retention would take away."""

from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.wire.messages import RelationMessage, WireColumn


def announced(name: str) -> RelationRecord:
    return RelationRecord(
        RelationMessage(42, "public", "t", "d", (WireColumn(name, 23, -1, True),)), catalog=None
    )


def test_a_version_added_once_is_found_by_a_later_process(tmp_path):
    uri = relations_uri(str(tmp_path))
    RelationIndex(uri).add(Epoch(1), announced("a"))
    assert RelationIndex(uri).find(42, announced("a").version) == announced("a")


def test_a_version_never_announced_is_not_found(tmp_path):
    index = RelationIndex(relations_uri(str(tmp_path)))
    assert index.find(42, 1) is None
    index.add(Epoch(1), announced("a"))
    assert index.find(42, announced("b").version) is None
    assert index.find(43, announced("a").version) is None


def test_adding_the_same_version_again_writes_nothing(tmp_path):
    uri = relations_uri(str(tmp_path))
    RelationIndex(uri).add(Epoch(1), announced("a"))
    before = sorted((tmp_path / "_pgrepl" / "relations" / "_delta_log").iterdir())
    RelationIndex(uri).add(Epoch(1), announced("a"))
    assert sorted((tmp_path / "_pgrepl" / "relations" / "_delta_log").iterdir()) == before
