"""Collapse of single histories: what it must see through, and what it must refuse."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import DriftError, IdentityError, LakeTableError, Remedy
from airflow_provider_pgrepl.replication.lake.merge.collapse import NetChanges, collapse
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from tests.support.changes import column, relation, table_of
from tests.support.model import Change

BY_KEY = relation(column("id", key=True), column("v"))
FULL = relation(column("id", key=True), column("v"), identity="f")
KEYLESS = relation(column("id"), column("v"), identity="n")


def insert(key: str, v: str | None = "v") -> Change:
    return Change("I", new=(key, v), commit_lsn=10)


def update(key: str, v: str | None = "v", *, old: tuple[str, str | None] | None = None) -> Change:
    return Change("U", new=(key, v), old=old, commit_lsn=10)


def delete(key: str, v: str | None = None) -> Change:
    return Change("D", old=(key, v), commit_lsn=10)


def outcome(of: Relation, *changes: Change) -> list[tuple[str | None, str | None, str | None]]:
    """(key in the lake, final key, final v) for each row; `=` stands for the lake's value."""
    return described(collapse(table_of(changes), of))


def described(collapsed: NetChanges) -> list[tuple[str | None, str | None, str | None]]:
    rows = []
    for n in range(len(collapsed)):
        origin = collapsed.key_texts(0, collapsed.origin[n : n + 1])[0].as_py()
        final = collapsed.key_texts(0, collapsed.final[n : n + 1])[0].as_py()
        value, keep = None, None
        if final is not None:
            value, keep = collapsed.texts(1, collapsed.final[n : n + 1] * 0 + n)
        rows.append((origin, final, "=" if keep is not None else value and value[0].as_py()))
    return sorted(rows, key=repr)


def test_a_chain_of_keys_ends_at_its_last_key() -> None:
    chain = update("2", old=("1", None)), update("3", "end", old=("2", None))
    assert outcome(BY_KEY, *chain) == [("1", "3", "end")]


def test_a_key_freed_by_one_row_is_taken_by_another() -> None:
    changes = update("9", "one", old=("1", None)), update("1", "two", old=("2", None))
    assert outcome(BY_KEY, *changes) == [("1", "9", "one"), ("2", "1", "two")]


def test_a_row_inserted_under_a_deleted_key_is_an_update_of_it() -> None:
    assert outcome(BY_KEY, delete("1"), insert("1", "new")) == [("1", "1", "new")]


def test_a_fresh_row_may_move_onto_the_key_of_a_deleted_row() -> None:
    changes = insert("5"), delete("1"), update("1", "x", old=("5", None))
    assert outcome(BY_KEY, *changes) == [("1", None, None), (None, "1", "x")]


def test_a_row_inserted_and_deleted_leaves_nothing() -> None:
    assert outcome(BY_KEY, insert("1"), delete("1")) == []


def test_only_what_follows_a_truncate_counts() -> None:
    collapsed = collapse(table_of([update("1"), Change("T", new=("0",)), insert("1", "after")]), BY_KEY)
    assert collapsed.overwrite
    assert described(collapsed) == [(None, "1", "after")]
    assert collapsed.last.tolist() == [2]


def test_after_a_truncate_an_unchanged_value_is_the_one_inserted() -> None:
    unchanged = Change("U", new=("1", None), unchanged=(1,))
    changes = insert("7"), insert("8"), Change("T", new=("0",)), insert("1", "sent"), unchanged
    assert outcome(BY_KEY, *changes) == [(None, "1", "sent")]


def test_a_key_deleted_inserted_moved_and_inserted_again_gives_two_rows() -> None:
    changes = delete("1"), insert("1", "a"), update("2", "b", old=("1", None)), insert("1", "c")
    assert outcome(BY_KEY, *changes) == [("1", "2", "b"), (None, "1", "c")]


def test_an_unchanged_value_keeps_the_lakes_until_one_is_sent() -> None:
    unchanged = Change("U", new=("1", None), unchanged=(1,))
    assert outcome(BY_KEY, unchanged) == [("1", "1", "=")]
    assert outcome(BY_KEY, unchanged, update("1", "sent")) == [("1", "1", "sent")]
    assert outcome(BY_KEY, update("1", "sent"), unchanged) == [("1", "1", "sent")]
    assert outcome(BY_KEY, update("1", "sent"), unchanged, unchanged) == [("1", "1", "sent")]
    assert outcome(BY_KEY, insert("1", "sent"), unchanged) == [(None, "1", "sent")]


def test_an_unchanged_key_is_taken_from_the_old_key() -> None:
    unchanged = Change("U", new=(None, "x"), old=("long key", None), unchanged=(0,))
    assert outcome(BY_KEY, unchanged) == [("long key", "long key", "x")]


def test_rows_that_swap_a_deferrable_key_are_told_apart_by_their_old_rows() -> None:
    swap = update("2", "a", old=("1", "a")), update("1", "b", old=("2", "b"))
    assert outcome(FULL, *swap) == [("1", "2", "a"), ("2", "1", "b")]


def test_old_rows_with_null_and_with_empty_text_are_distinguished() -> None:
    swap = update("1", "", old=("2", "")), update("2", None, old=("1", None))
    assert outcome(FULL, *swap) == [("1", "2", None), ("2", "1", "")]


def test_with_full_identity_a_row_that_moves_on_is_not_taken_for_the_lakes_row() -> None:
    chain = update("2", "a", old=("1", "a")), update("3", "a", old=("2", "a"))
    assert outcome(FULL, *chain) == [("1", "3", "a")]


def test_with_full_identity_unchanged_values_do_not_blur_the_row() -> None:
    moved = Change("U", new=("2", None), old=("1", "long"), unchanged=(1,))
    assert outcome(FULL, moved, update("3", "b", old=("2", "long"))) == [("1", "3", "b")]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([insert("1"), insert("1")], id="insert of a key that is there"),
        pytest.param([update("1"), insert("1")], id="insert of a key that was updated"),
        pytest.param([delete("1"), update("1")], id="update of a deleted row"),
        pytest.param([delete("1"), delete("1")], id="delete of a deleted row"),
        pytest.param([update("2", old=("1", None)), delete("1")], id="delete under a former key"),
        pytest.param([update("2"), update("2", old=("1", None))], id="move onto a key that is there"),
        pytest.param(
            [insert("1"), update("2", old=("1", None)), delete("1")], id="delete under a fresh row's key"
        ),
        pytest.param([Change("T", new=("0",)), update("1")], id="update after a truncate"),
        pytest.param([Change("D", old=("1", None), unchanged=(1,))], id="delete with an unchanged value"),
        pytest.param([Change("D")], id="delete without a key"),
        pytest.param([Change("U", old=("1", None))], id="update without a row"),
        pytest.param([Change("M", new=("1", "2"))], id="a message among the changes"),
    ],
)
def test_changes_that_contradict_each_other_are_refused(changes: list[Change]) -> None:
    with pytest.raises(LakeTableError, match="inconsistent"):
        collapse(table_of(changes), BY_KEY)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([insert("1"), Change("D", old=(None, None))], id="null as key"),
        pytest.param([Change("U", new=(None, "x"), unchanged=(0,))], id="unchanged key without old key"),
    ],
)
def test_changes_that_do_not_carry_their_key_are_refused(changes: list[Change]) -> None:
    with pytest.raises(IdentityError, match="does not carry the key"):
        collapse(table_of(changes), BY_KEY)


def test_an_insert_that_lacks_a_value_stops_the_table() -> None:
    """An UPDATE that moved a row into a row filter is sent so. No other change has the value."""
    moved = table_of([insert("1"), Change("I", new=("2", None), unchanged=(1,))])
    with pytest.raises(IdentityError, match=r"moved a row into .* did not send column v, a large") as caught:
        collapse(moved, BY_KEY)
    assert caught.value.remedy is Remedy.RESNAPSHOT
    assert "REPLICA IDENTITY FULL" in caught.value.hint


def test_an_insert_may_lack_a_value_of_a_column_that_the_lake_leaves_out() -> None:
    columns = replace(BY_KEY.columns[0], attnum=1), replace(BY_KEY.columns[1], attnum=2)
    of = replace(BY_KEY, columns=columns, ignored=(2,))
    assert len(collapse(table_of([Change("I", new=("1", None), unchanged=(1,))]), of)) == 1


def test_two_rows_that_keep_one_key_at_the_end_are_refused_with_full_identity() -> None:
    with pytest.raises(LakeTableError, match="another row holds"):
        collapse(table_of([insert("1", "a"), insert("1", "b")]), FULL)


def test_an_update_without_its_old_row_is_refused_with_full_identity() -> None:
    with pytest.raises(LakeTableError, match="lacks the old row"):
        collapse(table_of([update("1", "a")]), FULL)


def test_another_number_of_columns_is_drift() -> None:
    with pytest.raises(DriftError, match=r"number of columns"):
        collapse(table_of([Change("I", new=("1", "2", "3"))]), BY_KEY)


def test_a_keyless_table_takes_equal_rows_and_no_other_change() -> None:
    collapsed = collapse(table_of([insert("1"), insert("1")]), KEYLESS)
    assert len(collapsed) == 2
    assert collapsed.only_inserts
    for change in (update("1"), delete("1")):
        with pytest.raises(IdentityError, match="no key"):
            collapse(table_of([insert("1"), change]), KEYLESS)


def test_no_changes_collapse_to_nothing() -> None:
    assert len(collapse(table_of([]), BY_KEY)) == 0
    assert len(collapse(table_of([]), FULL)) == 0


def test_changes_in_pieces_and_slices_read_the_same() -> None:
    changes = [insert(str(n), f"v{n}") for n in range(10)] + [delete("3"), update("4", "u")]
    whole = pa.concat_tables([table_of(changes[:5]), table_of(changes[5:])])
    expected = [(None, str(n), "u" if n == 4 else f"v{n}") for n in range(2, 10) if n != 3]
    assert described(collapse(whole.slice(2), BY_KEY)) == sorted(expected, key=repr)
