"""Values that are not kept, taken out of changelog rows before they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Hidden = Mapping[int, Sequence[int]]
"""By relation version: the columns, by their places in the message, that are not kept."""


def without_hidden(rows: pa.Table, hidden: Hidden) -> pa.Table:
    """The rows with null in place of such values, in `new` and in `old`: they are nowhere any more."""
    versions = rows["relation_version"].to_numpy()
    found = [version for version in np.unique(versions).tolist() if hidden.get(version)]
    if not found:
        return rows
    for name in ("new", "old"):
        index = rows.schema.get_field_index(name)
        lists = rows[name].combine_chunks()
        rows = rows.set_column(index, rows.schema.field(index), _blanked(lists, versions, found, hidden))
    return rows


def _blanked(
    lists: pa.LargeListArray, versions: npt.NDArray[np.int64], found: Sequence[int], hidden: Hidden
) -> pa.LargeListArray:
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    # Anew, so that offsets begin at 0 and nothing of other rows is behind them.
    starts = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy())])
    values = lists.flatten()
    blank = np.zeros(len(values), bool)
    for version in found:
        mine = np.flatnonzero(versions == version)
        places = starts[mine][:, None] + np.asarray(hidden[version])[None, :]
        blank[places[places < starts[mine + 1][:, None]]] = True
    # Taken one by one: if_else would say that they are null, and leave their bytes where they are.
    values = values.take(pa.array(np.arange(len(values)), mask=blank))
    return pa.LargeListArray.from_arrays(pa.array(starts), values, mask=lists.is_null())
