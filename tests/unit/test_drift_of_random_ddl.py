"""judge(), over random DDL on a model of a table: the lake is what the table is, or it has stopped.

The catalog is read at the message or at any time after it, as a receiver does that lags or was stopped.
"""

from __future__ import annotations

from itertools import repeat

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from tests.support.examples import examples
from tests.support.shifting_model import TYPES, ModelLake, Run

NAMES = st.sampled_from(["a", "b", "c"])
TYPE_NAMES = st.sampled_from(list(TYPES))
KEYS = st.integers(1, 3)
DDL = st.one_of(
    st.tuples(st.just("add"), NAMES, TYPE_NAMES, st.sampled_from(["none", "constant", "volatile"])),
    st.tuples(st.just("drop"), NAMES),
    st.tuples(st.just("rename"), NAMES, NAMES),
    st.tuples(st.just("swap"), NAMES, NAMES),
    st.tuples(st.just("widen"), NAMES),
    st.tuples(st.just("retype"), NAMES, TYPE_NAMES),
    st.tuples(st.sampled_from(["use", "touch"]), NAMES),
    st.just(("vacuum",)),
)
STEPS = st.lists(st.one_of(KEYS, DDL, st.just("reconnect")), min_size=2, max_size=12)


def run_of(steps: list[object]) -> Run:
    run = Run()
    for step in steps:
        if step == "reconnect":
            run.reconnect()
        else:
            run.step(step)  # type: ignore[arg-type]
    return run


@examples(200)
@given(STEPS, st.lists(st.integers(0, 9), min_size=12, max_size=12))
def test_the_lake_equals_the_table_or_has_stopped_however_late_the_catalog_was_read(
    steps: list[object], delays: list[int]
) -> None:
    run = run_of(steps)
    lake = ModelLake(run.catalogs[0])
    for written, record in run.records(iter(delays)):
        if record is not None:
            if not lake.follow(record):
                assert lake.reason
                return
            # Other columns of the same names and types by the time of reading: a limit that is documented.
            assume(not record.same_columns or [c.attnum for c in lake.relation.columns] == written.attnums)
        lake.take(written.values)
        assert lake.shown() == written.table, run.said


SAFE_STEP = st.one_of(
    st.tuples(st.just("add"), TYPE_NAMES, st.sampled_from(["none", "constant"])),
    st.tuples(st.sampled_from(["drop", "widen", "touch"]), st.integers(0, 9)),
    st.just(("vacuum",)),
)


@examples(80)
@given(st.lists(st.lists(SAFE_STEP, min_size=1, max_size=3), max_size=6))
def test_safe_ddl_is_followed_when_the_catalog_is_read_with_the_message(
    gaps: list[list[tuple[object, ...]]],
) -> None:
    """A row is written after each few DDLs, among which none that is known to look like an unsafe one."""
    run = Run()
    run.step(1)
    for number, ddl in enumerate(gaps):
        for step in in_no_doubt(run, ddl, number):
            run.step(step)
        run.step(1 + number % 3)
    lake = ModelLake(run.catalogs[0])
    for written, record in run.records(repeat(0)):
        assert record is None or lake.follow(record), (lake.reason, run.said)
        lake.take(written.values)
        assert lake.shown() == written.table, run.said


def in_no_doubt(run: Run, ddl: list[tuple[object, ...]], number: int) -> list[tuple[object, ...]]:
    """The DDL of one gap between rows: what rewrites comes alone, and what is added is not dropped in it."""
    known = [column.name for column in run.source.columns if column.attnum > 1]
    steps: list[tuple[object, ...]] = []
    for place, (what, *more) in enumerate(ddl):
        if what == "add":
            steps.append(("add", f"new_{number}_{place}", *more))
        elif what == "vacuum" or not known:
            steps.append(("vacuum",))
        else:
            name = known[int(str(more[0])) % len(known)]
            if what == "drop":
                known.remove(name)
            steps.append((what, name))
    rewrites = [step for step in steps if step[0] in ("vacuum", "widen")]
    return rewrites[:1] if rewrites else steps


ADD_B, DROP_B = ("add", "b", "integer", "none"), ("drop", "b")


@pytest.mark.parametrize(
    "steps",
    [
        [DROP_B, ADD_B, 1, DROP_B, ADD_B],
        [DROP_B, ADD_B, 1, ("rename", "b", "c")],
        [DROP_B, ("rename", "a", "b"), 1, DROP_B],
        [DROP_B, ADD_B, 1, DROP_B],
        [("add", "c", "integer", "none"), 1, ("drop", "c"), ("add", "c", "integer", "none")],
        [("swap", "a", "b"), 1, ("drop", "a")],
    ],
    ids=lambda steps: "; ".join(" ".join(step) if isinstance(step, tuple) else "write" for step in steps),
)
def test_reused_column_name_is_not_followed_from_late_catalog(steps: list[object]) -> None:
    """Random DDL seldom gets there. The catalog is read after all of it."""
    run = run_of([1, *steps])
    lake = ModelLake(run.catalogs[0])
    last = run.catalogs[-1]
    records = [RelationRecord(w.message, last) for w in run.written[1:] if w.message is not None]
    assert records
    assert not lake.follow(records[0]), run.said
