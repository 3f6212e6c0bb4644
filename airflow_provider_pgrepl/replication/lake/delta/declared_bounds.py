"""Of which columns all files of a lake table have bounds: a table property says it.

Readers that go through deltalake's Arrow dataset take a column that may have bounds, and has none in a file,
for one that no condition holds of there, and lose its rows; the property tells them which may have. It
names only columns that were there, with bounds in every file, when the files were written as a whole: an
added column has none in the files from before it, and one that gets a value without bounds leaves the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.lake.delta.statistics import boundable_columns, has_safe_bounds

_PROPERTY = "delta.dataSkippingStatsColumns"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"`((?:[^`]|``)*)`|([^,`]+)")


def declaration(columns: Iterable[str]) -> dict[str, str]:
    """The property, for a table of which these columns have bounds in all files."""
    return {_PROPERTY: ",".join(map(_quoted, columns))}


def declared_columns(table: DeltaTable) -> list[str] | None:
    """What the property says; None for a table that has it not."""
    text = table.metadata().configuration.get(_PROPERTY)
    if text is None:
        return None
    return [quoted.replace("``", "`") or plain.strip() for quoted, plain in _NAME.findall(text)]


def columns_found_bounded(table: DeltaTable) -> list[str]:
    """The columns of which the log of a table has bounds for all files."""
    files = pa.table(table.get_add_actions(flatten=True))
    columns = boundable_columns(pa.schema(table.schema().to_arrow()))
    return [name for name in columns if _is_bounded(files, name)]


def _is_bounded(files: pa.Table, column: str) -> bool:
    if files.num_rows == 0:
        return True
    told = [f"{which}.{column}" for which in ("null_count", "min", "max")]
    if not set(told) <= set(files.column_names):
        return False
    nulls, least, most = (files[name] for name in told)
    is_empty = pc.fill_null(pc.equal(nulls, files["num_records"]), False)
    has_both = pc.and_(pc.is_valid(least), pc.is_valid(most))
    every = pc.all(pc.or_(is_empty, has_both)).as_py()
    return bool(every and has_safe_bounds(least) and has_safe_bounds(most))


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else f"`{name.replace('`', '``')}`"
