"""The tree of this package's errors.

Each class declares if a retry can help (`retry`), and if one table or the pipeline stops (`scope`)::

    PgReplError
    ├─ ConfigError                 the pipeline file or an argument is wrong
    ├─ SourceError                 PostgreSQL
    │  ├─ SourceConnectionError    cannot be reached                          (retry)
    │  │  └─ LoginError            rejects the login
    │  ├─ ServerSettingError       wal_level, no free slot or walsender, version
    │  ├─ PrivilegeError           a right is missing
    │  ├─ TableError               missing, not a table, no usable key        (table)
    │  ├─ SlotError                missing, invalidated, of another program
    │  ├─ BusyError                in use by another process                  (retry)
    │  ├─ PublicationError         missing, recreated, of another program
    │  ├─ SnapshotError            the exported snapshot cannot be used       (retry)
    │  │  └─ TableSnapshotError    it cannot be used for one table            (retry, table)
    │  ├─ RewoundError             another server, or restored to an earlier state
    │  └─ UnsendableError          a transaction that the server fails to send
    ├─ WireError                   bytes that are not pgoutput
    ├─ ValueRangeError             a value that its lake type cannot hold     (table)
    ├─ DriftError                  the table definition changed               (table)
    ├─ IdentityError               changes do not identify the changed row    (table)
    ├─ TruncatedError              TRUNCATE, where `truncate` is `error`      (table)
    ├─ GapError                    a skipped transaction may have changed the table  (table)
    ├─ ChangelogError              the changelog has a newer layout, or lacks data
    │  ├─ NoChangelogError         there is no changelog yet
    │  └─ ChangelogFileGoneError   a file was deleted while it was read       (retry)
    ├─ FencedError                 another process replaced this one          (retry)
    ├─ StateError                  the `_pgrepl` schema cannot be used
    ├─ LakeError                   the lake cannot be reached, or is of another pipeline
    │  ├─ LakeUnavailableError     temporarily cannot be read or written      (retry)
    │  └─ LakeTableError           one lake table                             (table)
    │     ├─ LakeChangedError      another program has written it             (table)
    │     └─ OvertakenError        another program committed at the same time (retry, table)
    ├─ TargetError                 a broker rejects a publisher, or its events
    │  ├─ MessageError             a broker delivers a message that is not creek's
    │  └─ TargetUnavailableError   temporarily unreachable, full or blocked   (retry)
    ├─ TransformError              a transform of a publisher fails           (table)
    ├─ SparkError                  Spark failed to run this package's work    (retry)
    └─ ToolError                   a required program is missing, or a library is too old

Messages have names, LSNs and counts, never values of rows and never a password.
All classes can be pickled, because Spark and Airflow send them between processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from enum import Enum, StrEnum
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_DOCUMENTS = _PACKAGE / "documents" / "docs"
"""The folder of the documents in an installed wheel."""
SNAPSHOT = "run pgrepl snapshot FILE.json, or PgSnapshotOperator"
NEW_EPOCH = (
    "begin a new epoch, which resnapshots every table: pgrepl snapshot FILE.json --new-epoch, or"
    " PgSnapshotOperator with new_epoch=True"
)
RESNAPSHOT = "resnapshot the table: pgrepl snapshot FILE.json --tables NAME, or PgResnapshotOperator"
EXECUTORS = (
    "install the driver's version of this package for the Python of every executor, as in an image, and name"
    " that Python in spark.pyspark.python: docs/how-to/run-on-a-cluster.md"
)


def escaped(text: str) -> str:
    """Return a text with unprintable characters escaped, except line breaks and tabs.

    Object names can hold control characters, and characters that change the writing direction. To escape line
    breaks and tabs in a name as well, use `names.show_identifier` or `one_line`.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escape(letter) for letter in text)


def one_line(text: str) -> str:
    """Return a text with all unprintable characters escaped, including line breaks and tabs."""
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


class Retry(Enum):
    """The effect of a retry on an error."""

    TIMED = "retry may help"
    NEVER = "will not help"


class Scope(Enum):
    """The scope of an error: it stops one table, or the whole pipeline."""

    TABLE = "table"
    PIPELINE = "pipeline"


class Remedy(StrEnum):
    """The remedy for a table that stopped. The table's record stores it, and the hint describes it."""

    RESNAPSHOT = "resnapshot"
    """Resnapshot the table."""
    UNDO = "undo"
    """Revert the change at the source, and retry the table."""
    MOVED = "moved"
    """Rename the table back, and retry it."""
    ADDED = "added"
    """Add the table under its new name."""
    PUBLISH = "publish"
    """Add the table to the publication again, and resnapshot it."""
    GONE = "gone"
    """Remove the table from the pipeline; or create it again, and resnapshot it."""
    POLICY = "policy"
    """Set `on_drift` to `evolve` for the table, and retry it."""
    LOGGED = "logged"
    """Make it an ordinary, logged table, and resnapshot it."""
    CHOICE = "choice"
    """Fix the column at the source or its setting in the pipeline file, and retry the table."""
    GRANT = "grant"
    """Grant the role its rights again, and retry the table."""

    @property
    def allows_retry(self) -> bool:
        """Return True if the table can continue without a new copy after this remedy."""
        return self in (Remedy.UNDO, Remedy.MOVED, Remedy.POLICY, Remedy.CHOICE, Remedy.GRANT)


class PgReplError(Exception):
    """The root of the tree.

    `message`: the problem. `hint`: the next step, as an instruction. `remedy`: the next step as a value for
    programs, if they need it. `trace`: classes and frames of the unexpected exception that this error
    replaces, or "" (`trace.traced`).
    """

    trace = ""
    retry = Retry.NEVER
    scope = Scope.PIPELINE

    def __init__(self, message: str, hint: str = "", remedy: Remedy | None = None) -> None:
        self.message = escaped(message)
        self.hint = escaped(hint)
        super().__init__(self.message, self.hint)
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(PgReplError, ValueError):
    """The pipeline file or an argument is wrong."""


class SourceError(PgReplError):
    """An error of the source database."""


class SourceConnectionError(SourceError):
    """The source cannot be reached, or rejected a login that may succeed later."""

    retry = Retry.TIMED


class LoginError(SourceConnectionError):
    """The source rejected the login (SQLSTATE 28P01, 28000), and this process has never logged in with it."""

    retry = Retry.NEVER


class ServerSettingError(SourceError):
    """The server is not set up for logical replication, or has no free slot or walsender."""


class PrivilegeError(SourceError):
    """The role lacks a right. The message lists the missing rights."""


class TableError(SourceError):
    """A table cannot be replicated."""

    scope = Scope.TABLE


class SlotError(SourceError):
    """The slot is missing, was invalidated or moved, or belongs to another program or database."""


class BusyError(SourceError):
    """Another process holds the slot, the pipeline's lock or a lock on a table."""

    retry = Retry.TIMED


class PublicationError(SourceError):
    """The publication is missing, was recreated, is another program's, or would publish `_pgrepl` tables."""


class SnapshotError(SourceError):
    """The exported snapshot cannot be used. A retry exports a new one."""

    retry = Retry.TIMED


class TableSnapshotError(SnapshotError):
    """The exported snapshot cannot be used for one table, which another statement locks or has altered."""

    scope = Scope.TABLE


class RewoundError(SourceError):
    """The source is another server, or was restored to an earlier state."""


class UnsendableError(SourceError):
    """The server fails to send a transaction. The transaction is in the WAL, so every retry fails again."""


class WireError(PgReplError):
    """Received bytes are not valid pgoutput."""


class ValueRangeError(PgReplError):
    """A lake type cannot hold a value. The message has column and type, never the value."""

    scope = Scope.TABLE


class DriftError(PgReplError):
    """The table's definition is no longer the recorded one."""

    scope = Scope.TABLE

    def __init__(self, message: str, hint: str = "", remedy: Remedy | None = Remedy.RESNAPSHOT) -> None:
        super().__init__(message, hint, remedy)


class IdentityError(PgReplError):
    """Changes of the table do not identify the row that was changed."""

    scope = Scope.TABLE


class TruncatedError(PgReplError):
    """The table was truncated, and its `truncate` setting is `error`."""

    scope = Scope.TABLE


class GapError(PgReplError):
    """Changes of the table are missing: a transaction was skipped that may have changed it."""

    scope = Scope.TABLE


class ChangelogError(PgReplError):
    """The changelog is missing, has a newer layout, or lacks required data."""


class NoChangelogError(ChangelogError):
    """There is no changelog: no epoch has begun."""


class ChangelogFileGoneError(ChangelogError):
    """A listed changelog file no longer exists: its hour was dropped or compacted, or the file is lost."""

    retry = Retry.TIMED


class FencedError(PgReplError):
    """Another process replaced this one, which must end at once."""

    retry = Retry.TIMED


class StateError(PgReplError):
    """The `_pgrepl` schema cannot be used."""


class LakeError(PgReplError):
    """The lake cannot be reached, or belongs to another pipeline."""


class LakeUnavailableError(LakeError):
    """The lake's storage, or a catalog of its tables, is temporarily full or unreachable."""

    retry = Retry.TIMED


class LakeTableError(LakeError):
    """One lake table is not as this pipeline left it."""

    scope = Scope.TABLE


class LakeChangedError(LakeTableError):
    """Another program has written a lake table: its version or its columns are not this pipeline's."""


class OvertakenError(LakeTableError):
    """Another program committed to a lake table at the same time, and did not change the position."""

    retry = Retry.TIMED


class TargetError(PgReplError):
    """A broker rejects a publisher's login, its rights, its exchange or an event."""


class MessageError(TargetError):
    """A broker delivers a message that is not creek's, or that does not match its schema."""


class TargetUnavailableError(TargetError):
    """A broker is unreachable, or temporarily accepts no events."""

    retry = Retry.TIMED


class TransformError(PgReplError):
    """A transform of a publisher fails, or returns something that cannot be sent."""

    scope = Scope.TABLE


class SparkError(PgReplError):
    """Spark failed. No table caused the failure, and nothing in the lake has changed."""

    retry = Retry.TIMED


class ToolError(PgReplError):
    """A required program is missing, or a library is older than the first supported version.

    Required are Java, Spark and jars, and on executors this package.
    """


def resnapshot(table: object) -> str:
    """Return the hint for a table that needs a new copy. `table`: its name as in SQL."""
    return f"resnapshot it: pgrepl snapshot FILE.json --tables '{table}', or PgResnapshotOperator"


def named(hint: str, table: object) -> str:
    """Return a hint in which the table's name replaces NAME."""
    return hint.replace("--tables NAME", f"--tables '{table}'").replace("--add NAME", f"--add '{table}'")


def add(table: object) -> str:
    """Return the hint for a table that is not, or no longer, part of the pipeline."""
    return f"add {table}: pgrepl snapshot FILE.json --add '{table}', or PgAddTablesOperator"


def remove(*tables: object) -> str:
    """Return the hint for tables that should no longer be replicated. Each table is an argument."""
    quoted = " ".join(f"'{table}'" for table in tables)
    return f"pgrepl remove FILE.json {quoted}, or PgRemoveTablesOperator"


def rename_settings(table: object, new: object) -> str:
    """Return the hint for a renamed table whose old name is in settings of the pipeline file."""
    return (
        f"change {table} to {new} in every setting of the pipeline file that names it or a column of it"
        " (exclude_columns, per_table and so on)"
    )


def reference(page: str) -> str:
    """Return a hint to a page of the reference: its path on this host, or in a checkout."""
    folder = str(_DOCUMENTS) if _DOCUMENTS.is_dir() else "docs"
    return f"see {folder}/reference/{page}.md"


def prove_source() -> str:
    """Return the hint for a source that may not be the lake's.

    It does not propose a new epoch: the user must first check which source this is.
    """
    return (
        "check the connection (conn_id, or PGREPL_DSN): the lake continues with the server that has all that"
        " the lake has. After a failover or a restore, or if the slot was dropped:"
        f" {reference('errors')}. Nothing was changed"
    )


def known_keys(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return the hint for unknown keys: a similar known key for each, or else all known keys."""
    meant = [near[0] for key in unknown if (near := get_close_matches(key, list(known), 1))]
    if len(meant) == len(unknown):
        return f"did you mean {', '.join(map(repr, meant))}?"
    return f"known keys: {', '.join(known)}"
