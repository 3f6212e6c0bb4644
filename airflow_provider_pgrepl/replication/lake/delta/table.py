"""One lake table: its app IDs, its position, and its handle in this process.

All writers of a table commit under one Delta app ID, `<pipeline>:<epoch>`, whose version is the table's
position. A writer reads the position and commits through the same handle, which it does not refresh in
between. So Delta rejects the commit if another process has committed under that app ID since. The first
commit of an epoch also sets the app IDs of earlier epochs to CLOSED, so that their writers are fenced for
good.
"""

from __future__ import annotations

from functools import partial

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import RESNAPSHOT, RETRY, FencedError, LakeTableError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.lake import hadoop_uri
from airflow_provider_pgrepl.replication.storage import (
    has_commit,
    open_storage,
    raise_if_store_unavailable,
    requests_at_once,
)
from airflow_provider_pgrepl.replication.storage.durable import local_path

from .live_files import app_version, check_files, commit_fingerprint, has_retention, settle_log
from .ownership import TRANSACTION_RETENTION, path_mark, table_marks

CLOSED = 2**63 - 1
"""The version of the app ID of an epoch that a later epoch has ended."""

RELATION_APP = "pgrepl-relation"
"""Delta app ID whose version is that of the relation whose columns the table has."""
BEFORE_APP = "pgrepl-relation-before"
"""Delta app ID whose version is that of the relation to which the first changes after the position belong.

It differs from that of RELATION_APP while the table has evolved for a transaction that is not in it yet: the
changes of that transaction before its DDL belong to the older relation.
"""
EXPORTED_APP = "pgrepl-exported-us"
"""Delta app ID whose version is the time of the snapshot's export, in microseconds since 1970."""

FENCED_HINT = (
    "this process ends. Find the other one in pgrepl status FILE.json: if both are retried, as by two DAGs,"
    " they replace each other; keep one"
)
_handles: dict[str, tuple[DeltaTable, str]] = {}
"""By table URI: the handle, and the fingerprint of the commit at which this process left the table."""


def app_id(pipeline_name: str, epoch: Epoch) -> str:
    """Return the Delta app ID under which a pipeline commits in an epoch."""
    return f"{pipeline_name}:{epoch}"


def spark_path(uri: str) -> str:
    """Return the location of a Delta table as Spark SQL expects it after `delta.`: not percent-encoded."""
    local = local_path(uri)
    return spark_identifier(hadoop_uri(uri.rstrip("/")) if local is None else str(local))


def spark_identifier(name: str) -> str:
    """Return a name quoted for Spark SQL."""
    return f"`{name.replace('`', '``')}`"


def open_table(uri: str) -> DeltaTable:
    """Open the newest version of the table at `uri`.

    Raises LakeTableError if there is no table or it cannot be opened, LakeUnavailableError.
    """
    table = find_table(uri)
    if table is None:
        raise missing_table(uri)
    return table


def missing_table(uri: str) -> LakeTableError:
    """Return the error of a table that should be at `uri`."""
    return LakeTableError(
        f"there is no lake table at {uri}",
        f"check that the folder is mounted and readable, or restore it, then {RETRY}. If it is lost,"
        f" {RESNAPSHOT}",
    )


def find_table(uri: str) -> DeltaTable | None:
    """Open the newest version of the table at `uri`; return None if there is no table.

    Raises LakeTableError if the table cannot be opened, LakeUnavailableError.
    """
    try:
        return open_delta(uri)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise_if_store_unavailable(f"the lake table at {uri} cannot be opened", error)
        raise LakeTableError(f"cannot open the lake table at {uri}: {type(error).__name__}") from error


def read_position(table: DeltaTable, app: str) -> LSN | None:
    """Return the LSN up to which the table has every transaction; None if this epoch has not written it.

    Raises FencedError if a later epoch has written the table.
    """
    version = app_version(table, app)
    if version == CLOSED:
        raise FencedError(f"{table.table_uri}: a later epoch than that of {app} has written it", FENCED_HINT)
    return None if version is None else LSN(version)


def no_position(table: DeltaTable) -> str:
    """Return why a table has no position of an epoch, as the end of a sentence."""
    if not has_retention(table):
        return "its lake table was not made in this epoch"
    return (
        "its lake table was not made in this epoch, or its position has expired, because another program has"
        f" set {TRANSACTION_RETENTION} on it. Remove that: ALTER TABLE delta.{spark_path(table.table_uri)}"
        f" UNSET TBLPROPERTIES ('{TRANSACTION_RETENTION}')"
    )


def earlier_apps(pipeline_name: str, epoch: Epoch) -> list[str]:
    """Return the app IDs of all earlier epochs, oldest first."""
    return [app_id(pipeline_name, Epoch(number)) for number in range(1, epoch)]


def epoch_of(app: str) -> Epoch:
    """Return the epoch in an app ID."""
    return Epoch(int(app.rpartition(":")[2]))


def pipeline_of(app: str) -> str:
    """Return the name of the pipeline in an app ID."""
    return app.rpartition(":")[0]


def relation_marks(table: DeltaTable, version: int) -> dict[str, int]:
    """Return the app IDs for a commit after which the table and the changes after it have one relation.

    Includes the marks of path and lake if an earlier version created the table without them. Raises
    LakeUnavailableError.
    """
    known = app_version(table, BEFORE_APP)
    before = {} if known in (None, version) else {BEFORE_APP: version}
    return {**missing_marks(table), RELATION_APP: version, **before}


def missing_marks(table: DeltaTable) -> dict[str, int]:
    """Return the marks for the next commit of a table that an earlier version created without them.

    Empty if the table has the mark of its path. Raises LakeUnavailableError.
    """
    uri = table.table_uri
    return {} if app_version(table, path_mark(uri)) is not None else table_marks(uri)


def open_newest(uri: str, app: str, confirmed_version: int | None = None) -> tuple[DeltaTable, int | None]:
    """Open the table's newest version. Return it, and the version at which this process left the table.

    The second value is None if this process had not opened the table, or if the table was recreated, restored
    from a copy, or lost commits since. Then torn commits are set aside, and the table's files are checked.

    `app`: the app ID under which this pipeline writes the table. `told` as in `find_torn`. Raises
    LakeTableError, LakeUnavailableError.
    """
    table, fingerprint = _handles.get(uri, (None, ""))
    if table is not None and fingerprint and fingerprint == commit_fingerprint(uri, int(table.version())):
        left = int(table.version())
        _refresh(table)
        # A crash of the host may have emptied commits of other programs since.
        since = range(left + 1, int(table.version()) + 1)
        with requests_at_once(open_storage(uri)[0], len(since)) as each:
            if all(each(partial(commit_fingerprint, uri), since)):
                return table, left
    settle_log(uri, pipeline_of(app), confirmed_version)
    table = open_table(uri)
    check_files(table)
    leave(table, uri)
    return table, None


def leave(table: DeltaTable, uri: str) -> str:
    """Keep the handle for the next `open_newest`, and return the fingerprint of its commit."""
    fingerprint = commit_fingerprint(uri, int(table.version()))
    _handles[uri] = table, fingerprint
    return fingerprint


def forget(uri: str) -> None:
    """Discard the handle of a table. After an error, it may be at another version than this process left."""
    _handles.pop(uri, None)


def _refresh(table: DeltaTable) -> None:
    try:
        # There is seldom a newer commit, and this check is cheaper than deltalake's own.
        if has_commit(table.table_uri, int(table.version()) + 1):
            table.update_incremental()
    except (DeltaError, OSError) as error:
        raise_if_store_unavailable(f"the lake table at {table.table_uri} cannot be opened", error)
        name = type(error).__name__
        raise LakeTableError(f"cannot open the lake table at {table.table_uri}: {name}") from error
