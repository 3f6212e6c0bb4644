"""One lake table: who writes it, and how far it has got.

All writers of a table use one Delta app id, `<pipeline>:<epoch>`, and write it with the version that is the
table's position. A writer reads the position and commits through one handle which it never refreshes in
between: Delta then refuses the commit if anybody has written that id meanwhile. An epoch's first commit
also closes the ids of the epochs before it, at CLOSED, so that their writers are refused for good.
"""

from __future__ import annotations

from functools import partial

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import FencedError, LakeTableError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.delta.live_files import (
    app_version,
    check_files,
    commit_fingerprint,
    has_retention,
    settle_log,
)
from airflow_provider_pgrepl.replication.lake.delta.ownership import (
    TRANSACTION_RETENTION,
    path_mark,
    table_marks,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import (
    has_commit,
    open_storage,
    raise_if_away,
    requests_at_once,
)

CLOSED = 2**63 - 1
"""The version under which the app id of an epoch that is over stands in a table."""

RELATION_APP = "pgrepl-relation"
"""Delta app id whose version is that of the relation for which the table is built."""
BEFORE_APP = "pgrepl-relation-before"
"""Delta app id whose version is that of the relation in which the changes above the position begin.

It is another one than RELATION_APP's while the table has evolved for a transaction that is not in it yet:
what the transaction changed before its DDL is still of the older relation.
"""
EXPORTED_APP = "pgrepl-exported-us"
"""Delta app id whose version is when the copied snapshot was exported: microseconds since 1970."""

FENCED_HINT = "this process must end; start it again only if no other one replicates this pipeline"
_handles: dict[str, tuple[DeltaTable, str]] = {}
"""With the fingerprint of the commit at which this process left each."""


def app_id(pipeline_name: str, epoch: Epoch) -> str:
    """The Delta app id under which everything of one pipeline and epoch is written."""
    return f"{pipeline_name}:{epoch}"


def open_table(uri: str) -> DeltaTable:
    """The table's newest version. Raises LakeTableError when there is none, LakeUnavailableError."""
    try:
        return open_delta(uri)
    except TableNotFoundError:
        raise LakeTableError(f"there is no lake table at {uri}") from None
    except (DeltaError, OSError) as error:
        raise_if_away(f"the lake table at {uri} cannot be opened", error)
        raise LakeTableError(f"cannot open the lake table at {uri}: {type(error).__name__}") from error


def read_position(table: DeltaTable, app: str) -> LSN | None:
    """The LSN up to which every transaction is in the table; None when this epoch never wrote it.

    Raises FencedError when the epoch is over: a later one has written the table.
    """
    version = app_version(table, app)
    if version == CLOSED:
        raise FencedError(f"{table.table_uri}: a later epoch than that of {app} has written it", FENCED_HINT)
    return None if version is None else LSN(version)


def no_position(table: DeltaTable) -> str:
    """Why a table has no position of an epoch, as the end of a sentence."""
    if not has_retention(table):
        return "its lake table was not made in this epoch"
    return (
        "its lake table was not made in this epoch, or its position has expired, because another program has"
        f" set {TRANSACTION_RETENTION} on it. Remove that: ALTER TABLE delta.`{table.table_uri}`"
        f" UNSET TBLPROPERTIES ('{TRANSACTION_RETENTION}')"
    )


def earlier_apps(pipeline_name: str, epoch: Epoch) -> list[str]:
    """The app ids of all epochs before this one, oldest first."""
    return [app_id(pipeline_name, Epoch(number)) for number in range(1, epoch)]


def epoch_of(app: str) -> Epoch:
    """The epoch that an app id is of."""
    return Epoch(int(app.rpartition(":")[2]))


def pipeline_of(app: str) -> str:
    """The pipeline that an app id is of."""
    return app.rpartition(":")[0]


def relation_marks(table: DeltaTable, version: int) -> dict[str, int]:
    """App ids of a commit after which the table, and the changes above its position, are of one relation.

    With those of path and lake, if an earlier version made the table without. Raises LakeUnavailableError.
    """
    known = app_version(table, BEFORE_APP)
    before = {} if known in (None, version) else {BEFORE_APP: version}
    return {**missing_marks(table), RELATION_APP: version, **before}


def missing_marks(table: DeltaTable) -> dict[str, int]:
    """Marks of a table that an earlier version made, for its next commit. Raises LakeUnavailableError."""
    uri = table.table_uri
    return {} if app_version(table, path_mark(uri)) is not None else table_marks(uri)


def open_newest(uri: str, app: str, told: int | None = None) -> tuple[DeltaTable, int | None]:
    """The table's newest version, and the one at which this process left it; None when it had not opened it,
    or it is not the same table any more: made anew, put back, or without its newest commits.

    `app`: under which this pipeline writes it; `told` as in `find_torn`. Raises LakeTableError.
    """
    table, fingerprint = _handles.get(uri, (None, ""))
    if table is not None and fingerprint and fingerprint == commit_fingerprint(uri, int(table.version())):
        left = int(table.version())
        _refresh(table)
        # What others have committed since may have been emptied before it was read.
        since = range(left + 1, int(table.version()) + 1)
        with requests_at_once(open_storage(uri)[0], len(since)) as each:
            if all(each(partial(commit_fingerprint, uri), since)):
                return table, left
    settle_log(uri, pipeline_of(app), told)
    table = open_table(uri)
    check_files(table)
    leave(table, uri)
    return table, None


def leave(table: DeltaTable, uri: str) -> str:
    """Remember the table for the next work, as it is now; the fingerprint of its newest commit."""
    fingerprint = commit_fingerprint(uri, int(table.version()))
    _handles[uri] = table, fingerprint
    return fingerprint


def forget(uri: str) -> None:
    """After an error a handle may not stand where the next work expects it."""
    _handles.pop(uri, None)


def _refresh(table: DeltaTable) -> None:
    try:
        # Seldom is there another, and looking for it is cheaper than asking deltalake to.
        if has_commit(table.table_uri, int(table.version()) + 1):
            table.update_incremental()
    except (DeltaError, OSError) as error:
        raise_if_away(f"the lake table at {table.table_uri} cannot be opened", error)
        name = type(error).__name__
        raise LakeTableError(f"cannot open the lake table at {table.table_uri}: {name}") from error
