"""Hidden values are gone from changelog rows, and everything else is as it was."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.receiver.changelog_rows import without_hidden
from tests.support.examples import examples

WIDTHS = {1: 1, 2: 3, 3: 4}
VALUES = st.sampled_from([None, "", "a", "ü", "classified"])


@st.composite
def changes(draw: st.DrawFn) -> dict[str, object]:
    version = draw(st.sampled_from([*WIDTHS]))
    tuples = st.one_of(st.none(), st.lists(VALUES, min_size=WIDTHS[version], max_size=WIDTHS[version]))
    return {"relation_version": version, "new": draw(tuples), "old": draw(tuples)}


@examples(100)
@given(
    st.lists(changes(), max_size=12),
    st.fixed_dictionaries({v: st.sets(st.integers(0, n - 1)).map(sorted) for v, n in WIDTHS.items()}),
    st.integers(0, 5),
)
def test_hidden_values_are_gone_and_no_others(
    rows: list[dict[str, object]], hidden: dict[int, list[int]], skipped: int
) -> None:
    whole = pa.Table.from_pylist([{"commit_lsn": 1, **row} for row in rows], schema=ROW_SCHEMA)
    found = without_hidden(whole.slice(skipped), hidden)
    assert found.schema == ROW_SCHEMA
    found.validate(full=True)
    for row, after in zip(rows[skipped:], found.to_pylist(), strict=True):
        gone = hidden[row["relation_version"]]  # type: ignore[index]
        for name in ("new", "old"):
            before = row[name]
            expected = before and [None if n in gone else v for n, v in enumerate(before)]  # type: ignore[arg-type,var-annotated]
            assert after[name] == expected
    held = b"".join(
        bytes(buffer)
        for name in ("new", "old")
        for chunk in found[name].chunks
        for buffer in chunk.buffers()
        if buffer is not None
    )
    if all("classified" not in str(after) for after in found.to_pylist()) and any(
        hidden[row["relation_version"]]
        for row in rows[skipped:]  # type: ignore[index]
    ):
        assert b"classified" not in held


def test_an_insert_lacks_no_value_that_is_hidden() -> None:
    rows = [
        {"relation_version": 1, "op": op, "new": [None] * WIDTHS[1], "unchanged": unchanged}
        for op, unchanged in (("I", [0]), ("I", [0, 1]), ("I", None), ("U", [0]))
    ]
    whole = pa.Table.from_pylist(rows, schema=ROW_SCHEMA)
    found = without_hidden(whole, {1: [0]})
    assert found.schema == ROW_SCHEMA
    assert found["unchanged"].to_pylist() == [None, [1], None, [0]]
