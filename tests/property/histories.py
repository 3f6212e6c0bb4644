"""Legal histories of one table, drawn at random, and how to cut them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.support.changes import History, column
from tests.support.model import Change, Row

# Columns: a two-column key around a value, and a value that may be unchanged.
KEY = (0, 2)
COLUMNS = (column("a", key=True), column("v"), column("b", key=True), column("doc"))

# Strategies of a table's merges, used one after the other and again.
strategies = st.lists(st.sampled_from(["rewrite", "merge_on_read"]), min_size=1, max_size=3)
# Partition column, most often none: a key column, or a value that may stay unchanged.
partitions = st.sampled_from([None, None, "a", "b", "doc"])

# A text with which folders and URLs have their ways.
ODD = "a/b=c%2F é\n"

key_part = st.sampled_from(["1", "2", "12", "", "é"])
value = st.one_of(st.none(), st.sampled_from(["", "x", "y", ODD]))
rows = st.tuples(key_part, value, st.sampled_from(["1", "2", "21"]), value)
pick = st.integers(0, 50)
steps = st.one_of(
    st.tuples(st.just("insert"), rows),
    st.tuples(st.just("update"), pick, value, st.sets(st.sampled_from([2, 3]))),
    st.tuples(st.just("move"), pick, rows, st.sets(st.just(3))),
    st.tuples(st.just("swap"), pick, pick, st.sets(st.just(3)), value),
    st.tuples(st.just("delete"), pick),
    st.tuples(st.just("reinsert"), pick, value),
    st.tuples(st.just("commit")),
    st.tuples(st.just("commit")),
    st.tuples(st.sampled_from(["commit"] * 5 + ["truncate"])),
)


def rekeyed(row: Row, other: Row) -> Row:
    return (other[0], row[1], other[2], row[3])


def swap(history: History, one: Row, two: Row, unchanged: set[int], between: str | None) -> None:
    """With a deferrable key both rows hold one key for a moment, in which the one that came changes again;
    otherwise the way leads over a third key."""
    if history.model.full:
        moved, touched = rekeyed(one, two), (two[0], between, two[2], one[3])
        history.update(one, moved, unchanged)
        if touched != two:
            history.update(moved, touched)
        history.update(two, rekeyed(two, one), unchanged)
        return
    spare = ("spare", one[1], "spare", one[3])
    history.update(one, spare, unchanged)
    history.update(two, rekeyed(two, one), unchanged)
    history.update(spare, rekeyed(spare, two), unchanged)


def take_step(history: History, step: tuple) -> None:  # noqa: C901 - one branch for each kind of step
    kind, *arguments = step
    present = sorted(history.model.rows.values(), key=repr)
    taken = {(row[0], row[2]) for row in present if history.model.key}
    free = lambda row: (row[0], row[2]) not in taken  # noqa: E731
    if kind == "commit":
        history.commit()
    elif kind == "truncate":
        history.truncate()
    elif kind == "insert":
        if free(arguments[0]):
            history.insert(arguments[0])
    elif present:
        row = present[arguments[0] % len(present)]
        if kind == "update":
            history.update(row, (row[0], arguments[1], row[2], row[3]), arguments[2])
        elif kind == "move" and free(arguments[1]):
            history.update(row, rekeyed(row, arguments[1]), arguments[2])
        elif kind == "delete":
            history.delete(row)
        elif kind == "reinsert":
            history.delete(row)
            history.insert((row[0], arguments[1], row[2], "again"))
        elif kind == "swap":
            other = present[arguments[1] % len(present)]
            if other != row:
                swap(history, row, other, arguments[2], arguments[3])


def batches(changes: list[Change], cuts: list[int]) -> list[list[Change]]:
    """Changes up to each cut that have not been given before, and at last the rest."""
    ends = [*cuts, max((c.commit_lsn for c in changes), default=0)]
    starts = [0, *ends]
    return [
        [c for c in changes if start < c.commit_lsn <= end]
        for start, end in zip(starts[:-1], ends, strict=True)
    ]
