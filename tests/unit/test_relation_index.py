"""The relation index keeps records that the changelog's retention would delete."""

import shutil
from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from airflow_provider_pgrepl.errors import LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog import relation_index
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, WireColumn
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation


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


def test_relation_index_answers_from_memory_after_folder_is_deleted(tmp_path):
    index = RelationIndex(relations_uri(str(tmp_path)))
    index.add(Epoch(1), announced("a"))
    shutil.rmtree(tmp_path / "_pgrepl")
    assert index.relation_ids() == [42]
    assert index.find(42, announced("a").version) == announced("a")


def selected(*names: str) -> Relation:
    columns = (Column(name, attnum, 23, -1, "integer") for attnum, name in enumerate(names, 1))
    return Relation(42, TableName("public", "t"), tuple(columns))


def test_names_that_another_process_selects_are_known_of_a_relation_that_was_known_before(tmp_path):
    uri = relations_uri(str(tmp_path))
    index = RelationIndex(uri)
    index.add(Epoch(1), announced("a"))
    assert index.records(42) == [announced("a")]
    RelationIndex(uri).add_selected(Epoch(1), [selected("a", "b")])
    index.catch_up()
    assert len(index.records(42)) == 2


def test_selected_relation_is_added_again_only_under_other_names(tmp_path):
    index = RelationIndex(relations_uri(str(tmp_path)))
    index.add_selected(Epoch(1), [selected("a", "b")])
    index.add_selected(Epoch(1), [replace(selected("a", "b"), relfilenode=7)])
    assert len(index.records(42)) == 1
    index.add_selected(Epoch(1), [selected("b", "a")])
    assert len(index.records(42)) == 2
    # The same oid at another source is another table.
    index.begin_source(Epoch(2))
    index.add_selected(Epoch(2), [selected("a", "b")])
    assert [record.catalog for record in index.records(42)] == [selected("a", "b")]


def test_relation_index_sees_later_additions_by_another_instance(tmp_path):
    index = RelationIndex(relations_uri(str(tmp_path)))
    assert index.relation_ids() == []
    RelationIndex(relations_uri(str(tmp_path))).add(Epoch(1), announced("a"))
    assert index.relation_ids() == [42]


def test_relation_index_sees_additions_interleaved_by_another_instance(tmp_path):
    uri = relations_uri(str(tmp_path))
    index, other = RelationIndex(uri), RelationIndex(uri)
    for own, others in (("a", "b"), ("c", "d")):
        index.add(Epoch(1), announced(own))
        other.add(Epoch(1), announced(others))
    index.add(Epoch(1), announced("e"))
    index.catch_up()
    assert {record.message.columns[0].name for record in index.records(42)} == set("abcde")


def test_ones_own_additions_are_not_read_again(tmp_path, monkeypatch):
    index = RelationIndex(relations_uri(str(tmp_path)))
    index.add(Epoch(1), announced("a"))
    index.catch_up()
    monkeypatch.setattr(relation_index, "query_delta", None)
    index.add(Epoch(1), announced("b"))
    index.add(Epoch(1), announced("c"))
    index.catch_up()
    assert len(index.records(42)) == 3


def test_records_of_a_relation_that_another_process_copied_are_found(tmp_path):
    """A receiver must know the names of its columns before its first change comes."""
    index = RelationIndex(relations_uri(str(tmp_path)))
    assert index.records(42) == []
    RelationIndex(relations_uri(str(tmp_path))).add(Epoch(1), announced("a"))
    assert index.records(42) == [announced("a")]


def unreadable(*_):
    raise LakeUnavailableError("the lake cannot be read")


def test_index_that_could_not_be_read_is_read_again(tmp_path, monkeypatch):
    """An empty answer would mean that no setting named a table or column by an earlier name."""
    uri = relations_uri(str(tmp_path))
    RelationIndex(uri).add(Epoch(1), announced("a"))
    index = RelationIndex(uri)
    with monkeypatch.context() as broken, pytest.raises(LakeUnavailableError):
        broken.setattr(relation_index, "query_delta", unreadable)
        index.records(42)
    assert index.records(42) == [announced("a")]


def test_additions_that_could_not_be_read_are_read_again(tmp_path, monkeypatch):
    uri, epoch = relations_uri(str(tmp_path)), Epoch(1)
    index = RelationIndex(uri)
    index.add(epoch, announced("a"), EffectiveFrom(10, "trigger"))
    RelationIndex(uri).add(epoch, announced("b"), EffectiveFrom(20, "trigger"))
    with monkeypatch.context() as broken, pytest.raises(LakeUnavailableError):
        broken.setattr(relation_index, "query_delta", unreadable)
        index.catch_up()
    index.catch_up()
    assert len(index.records(42)) == 2
    names = [index.effective(epoch, 42, lsn)[0].message.columns[0].name for lsn in (11, 21)]
    assert names == ["a", "b"]


def test_index_is_not_empty_for_another_thread_while_it_is_read(tmp_path, monkeypatch):
    uri = relations_uri(str(tmp_path))
    RelationIndex(uri).add(Epoch(1), announced("a"))
    index, seen = RelationIndex(uri), []

    def ask_meanwhile(*arguments):
        monkeypatch.undo()
        seen.append(index.records(42))
        return query_delta(*arguments)

    monkeypatch.setattr(relation_index, "query_delta", ask_meanwhile)
    assert index.records(42) == [announced("a")]
    assert seen == [[announced("a")]]


def test_oids_of_an_earlier_server_are_not_this_ones(tmp_path):
    index = RelationIndex(relations_uri(str(tmp_path)))
    index.add(Epoch(1), announced("a"))
    index.begin_source(Epoch(2))
    for found in (index, RelationIndex(relations_uri(str(tmp_path)))):
        assert (found.relation_ids(), found.records(42)) == ([], [])
        assert found.find(42, announced("a").version) == announced("a")  # its changes are read by it
    index.add(Epoch(2), announced("b"))
    assert index.records(42) == [announced("b")]


def test_new_index_instance_finds_effective_version_at_any_lsn(tmp_path):
    uri, epoch = relations_uri(str(tmp_path)), Epoch(1)
    index = RelationIndex(uri)
    index.add(epoch, announced("early"))
    for name, lsn in (("a", 10), ("b", 20), ("a", 30), ("b", 30)):
        index.add(epoch, announced(name), EffectiveFrom(lsn, "trigger"))
    later = RelationIndex(uri)
    found = {lsn: later.effective(epoch, 42, lsn) for lsn in (10, 11, 20, 21, 31)}
    assert found[10] is None
    names = [found[lsn][0].message.columns[0].name for lsn in (11, 20, 21, 31)]
    assert names == ["a", "a", "b", "b"]
    assert later.effective(Epoch(2), 42, 31) is None
    assert later.effective(epoch, 43, 31) is None


def test_the_same_at_a_place_again_writes_nothing_and_another_trigger_does(tmp_path):
    uri, epoch = relations_uri(str(tmp_path)), Epoch(1)
    index = RelationIndex(uri)
    index.add(epoch, announced("a"), EffectiveFrom(10, "trigger"))
    index.add(epoch, announced("a"), EffectiveFrom(20, "trigger"))
    assert index.effective(epoch, 42, 99)[1] == EffectiveFrom(10, "trigger")
    index.add(epoch, announced("a"), EffectiveFrom(30, "another"))
    assert index.effective(epoch, 42, 99)[1] == EffectiveFrom(30, "another")


def test_forgotten_version_is_not_effective_but_still_found(tmp_path):
    uri, epoch = relations_uri(str(tmp_path)), Epoch(1)
    RelationIndex(uri).add(epoch, announced("a"), EffectiveFrom(10, "trigger"))
    RelationIndex(uri).forget(epoch, 20)
    later = RelationIndex(uri)
    assert later.effective(epoch, 42, 20) is not None
    assert later.effective(epoch, 42, 21) is None
    assert later.find(42, announced("a").version) == announced("a")
    assert later.all() == [announced("a")]
    later.add(epoch, announced("a"), EffectiveFrom(20, "trigger"))
    assert RelationIndex(uri).effective(epoch, 42, 21) is not None


def test_an_index_of_an_earlier_version_of_the_program_is_read_and_added_to(tmp_path):
    uri, record = relations_uri(str(tmp_path)), announced("a")
    names = ["epoch", "relation_id", "relation_version", "record"]
    write_deltalake(uri, pa.table([[1], [42], [record.version], [record.to_json()]], names=names))
    RelationIndex(uri).add(Epoch(1), announced("b"), EffectiveFrom(10, "trigger"))
    later = RelationIndex(uri)
    assert later.find(42, record.version) == record
    assert later.effective(Epoch(1), 42, 11)[0] == announced("b")


def named(oid: int, name: str) -> Relation:
    return replace(selected("a"), oid=oid, table=TableName("public", name))


def test_name_in_the_pipeline_is_the_one_with_which_a_table_was_copied_last(tmp_path):
    uri = relations_uri(str(tmp_path))
    index, another = RelationIndex(uri), RelationIndex(uri)
    first, renamed, copied = named(42, "t"), named(42, "moved"), named(42, "other")
    # The stream, or an earlier version of this package, has recorded it without saying so.
    index.add(Epoch(1), RelationRecord.of_catalog(first))
    index.catch_up()
    assert index.pipeline_names() == {}
    another.add_selected(Epoch(1), [first, named(43, "u")])
    index.add(Epoch(1), RelationRecord.of_catalog(renamed))
    index.catch_up()
    assert index.pipeline_names() == {42: first.table, 43: TableName("public", "u")}
    another.add_selected(Epoch(1), [renamed, copied])
    index.catch_up()
    assert index.pipeline_names()[42] == copied.table
    # It is copied under an earlier name again, and then another table is copied under that.
    another.add_selected(Epoch(1), [first])
    index.catch_up()
    assert index.pipeline_names()[42] == first.table
    another.add_selected(Epoch(1), [named(44, "t")])
    index.catch_up()
    assert index.pipeline_names() == {44: first.table, 43: TableName("public", "u")}
    # A new epoch records again what was selected at its first snapshot and since, in this order.
    another.add_selected(Epoch(2), [first, named(44, "t"), named(44, "t")])
    index.catch_up()
    assert index.pipeline_names() == {44: first.table, 43: TableName("public", "u")}
    assert RelationIndex(uri).pipeline_names() == index.pipeline_names()
    another.begin_source(Epoch(3))
    index.catch_up()
    assert index.pipeline_names() == {}
    another.add_selected(Epoch(3), [first])
    index.catch_up()
    assert index.pipeline_names() == {42: first.table}


def test_selecting_a_table_again_under_its_name_writes_nothing(tmp_path):
    uri = relations_uri(str(tmp_path))
    RelationIndex(uri).add_selected(Epoch(1), [selected("a")])
    before = query_delta(open_delta(uri), "select * from it").num_rows
    RelationIndex(uri).add_selected(Epoch(1), [selected("a")])
    assert query_delta(open_delta(uri), "select * from it").num_rows == before == 1
