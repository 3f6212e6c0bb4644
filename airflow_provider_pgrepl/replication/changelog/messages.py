"""Reader of the logical messages (`pg_logical_emit_message`) in the changelog, for example of an outbox."""

from __future__ import annotations

import warnings

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.replication.values.scalars import Binary

from .gaps import NO_RELATION, gap_after
from .layout import changelog_uri
from .reader import live_files, open_changelog, read_epoch_number, read_floor_lsn, read_rows

MESSAGE_SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("lsn", pa.int64()),
        ("ordinal", pa.int64()),
        ("xid", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("transactional", pa.bool_()),
        ("prefix", pa.string()),
        ("content", pa.binary()),
        ("size", pa.int64()),
    ]
)


_CONTENT = Binary()


class SkippedMessagesWarning(UserWarning):
    """The warning that the messages of a skipped transaction may be missing from the result."""


def read_messages(
    lake: str | Pipeline, *, above_lsn: int | None = None, prefix: str | None = None, epoch: int | None = None
) -> pa.Table:
    """Return the logical messages of an epoch (default: the newest) in commit order, as MESSAGE_SCHEMA.

    `above_lsn` and `prefix` restrict the result. A consumer that passes the last `lsn` it has read as
    `above_lsn` gets each message once. The messages of a transaction appear together or not at all. Messages
    of this package's event trigger are left out.

    If a transaction was skipped, a call with `above_lsn` returns only the messages before it. A call without
    `above_lsn` returns all messages and issues a SkippedMessagesWarning.

    Raises ChangelogError if a skipped transaction comes next, if retention has dropped changes above
    `above_lsn`, and if there is no changelog. Raises LakeUnavailableError if the changelog cannot be read.
    """
    uri = changelog_uri(lake if isinstance(lake, str) else lake.lake_root)
    changelog = open_changelog(uri)
    wanted = read_epoch_number(changelog) if epoch is None else Epoch(epoch)
    floor = read_floor_lsn(changelog, wanted)
    if above_lsn is not None and above_lsn < floor:
        raise ChangelogError(
            f"the changelog has dropped changes up to {floor}, and messages above {LSN(above_lsn)} were"
            " requested",
            "to read all messages that are left, leave out above_lsn; to keep messages longer, raise"
            " changelog_retention_h",
        )
    above = LSN(above_lsn or 0)
    paths = [file.path for file in live_files(changelog, wanted, above) if file.may_hold(NO_RELATION)]
    filesystem, root = open_storage(uri)
    rows = read_rows(filesystem, root, paths, NO_RELATION, above)
    found = _as_messages(rows.filter(pc.equal(rows["op"], "M")))
    found = found.filter(pc.not_equal(found["prefix"], DDL_PREFIX))
    found = found if prefix is None else found.filter(pc.equal(found["prefix"], prefix))
    gap = gap_after(changelog, wanted, above)
    return found if gap is None else _before(gap, found, is_bounded=above_lsn is not None)


def _before(gap: LSN, found: pa.Table, *, is_bounded: bool) -> pa.Table:
    """Return the messages before a gap, or, unless `is_bounded`, all messages, with a SkippedMessagesWarning.

    Raises ChangelogError if no message precedes the gap.
    """
    skipped = f"the transaction at {gap} was skipped: its messages, if any, are lost"
    if not is_bounded:
        warnings.warn(skipped, SkippedMessagesWarning, stacklevel=3)
        return found
    before = found.filter(pc.less(found["lsn"], int(gap)))
    if before.num_rows == 0:
        raise ChangelogError(skipped, f"to continue after it, pass above_lsn={int(gap)}")
    return before


def _as_messages(rows: pa.Table) -> pa.Table:
    contents = [_CONTENT.parse(pc.list_element(texts, 1)) for texts in rows["new"].chunks]
    prefixes = [pc.list_element(texts, 0).cast(pa.string()) for texts in rows["new"].chunks]
    sizes = [_sizes(*pair) for pair in zip(rows["new"].chunks, contents, strict=True)]
    columns = {
        "epoch": rows["epoch"],
        "lsn": rows["commit_lsn"],
        "ordinal": rows["ordinal"],
        "xid": rows["xid"],
        "commit_ts": rows["commit_ts"],
        # A non-transactional message has no transaction ID.
        "transactional": pc.is_valid(rows["xid"]),
        "prefix": pa.chunked_array(prefixes, pa.string()),
        "content": pa.chunked_array(contents, pa.binary()),
        "size": pa.chunked_array(sizes, pa.int64()),
    }
    return pa.table(columns, MESSAGE_SCHEMA)


def _sizes(texts: pa.LargeListArray, contents: pa.Array) -> pa.Array:
    """Return the length of each content in bytes; for content that was left out, the recorded length."""
    sizes = pc.binary_length(contents).cast(pa.int64())
    if not sizes.null_count:
        return sizes
    left_out = sizes.is_null()
    recorded = pc.list_element(texts.filter(left_out), 2).cast(pa.string()).cast(pa.int64())
    return pc.replace_with_mask(sizes, left_out, recorded)
