"""A model of a table's rows after some changes: a plain dictionary of rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

Row = tuple[str | None, ...]


@dataclass(frozen=True)
class Change:
    """A changelog row; `unchanged` are the columns of `new` that hold None because they were not sent."""

    op: str
    new: Row | None = None
    old: Row | None = None
    unchanged: tuple[int, ...] = ()
    commit_lsn: int = 0


@dataclass
class Model:
    """One source table with its rows by an id that no update changes; `key` are the key's columns."""

    key: tuple[int, ...]
    full: bool = False
    rows: dict[int, Row] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=lambda: count(1))

    def apply(self, change: Change) -> None:
        if change.op == "T":
            self.rows.clear()
        elif change.op == "I":
            self.rows[next(self.ids)] = change.new
        else:
            image = change.old or change.new
            row_id, row = next(item for item in self.rows.items() if self._is(item[1], image))
            del self.rows[row_id]
            if change.op == "U":
                new = enumerate(change.new)
                self.rows[row_id] = tuple(row[i] if i in change.unchanged else text for i, text in new)

    def _is(self, row: Row, image: Row) -> bool:
        return row == image if self.full else all(row[i] == image[i] for i in self.key)
