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

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum, StrEnum
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_DOCUMENTS = _PACKAGE / "documents" / "docs"
"""The folder of the documents in an installed wheel."""
SNAPSHOT = "run pgrepl snapshot FILE.json, or PgSnapshotOperator"


def document(page: str) -> str:
    """Return the path of a page of the documents, such as `how-to/operate`, on this host or in a checkout."""
    folder = str(_DOCUMENTS) if _DOCUMENTS.is_dir() else "docs"
    return f"{folder}/{page}.md"


def reference(page: str) -> str:
    """Return a hint to a page of the reference."""
    return f"see {document(f'reference/{page}')}"


NEW_EPOCH = (
    "begin a new epoch, which drops the slot: pgrepl resync FILE.json, or PgSnapshotOperator with"
    " resync=True, compares every table with the lake and replaces the rows that differ; pgrepl snapshot"
    " FILE.json --new-epoch, or PgSnapshotOperator with new_epoch=True, resnapshots every table. If the"
    " source is not proven to be the lake's, either one prints the NAME with which to repeat it: --give-up"
    " NAME"
)
RESNAPSHOT = "resnapshot the table: pgrepl snapshot FILE.json --tables NAME, or PgResnapshotOperator"
RETRY = "retry the table: pgrepl retry FILE.json NAME, or PgRetryTablesOperator"
RESUME = "resume the table: pgrepl resume FILE.json NAME, or PgResumeTablesOperator"
EXECUTORS = (
    "install the driver's version of this package for the Python of every executor, as in an image, and name"
    " that Python in spark.pyspark.python:"
    f" {document('how-to/run-on-a-cluster')}"
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
    """Add the table under its new name; or set `on_rename` to `follow` for it, and resnapshot it."""
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

    The docstring of a class (what happened), its `advice` (what to do, in Markdown), `scope` and `retry` are
    its row of docs/reference/errors.md: `python -m tests.support.errors_page` writes it.
    """

    advice = ""
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
    """The pipeline file, an argument or the connection string is wrong. The message names the field."""

    advice = "correct the field"


class SourceError(PgReplError):
    """PostgreSQL rejected a statement or command. The base class of the source's errors below."""

    advice = "read PostgreSQL's message and SQLSTATE, and correct the cause on the server"


class SourceConnectionError(SourceError):
    """The source cannot be reached, rejected a login that may succeed later, or the connection was lost."""

    advice = "check the network and the connection (`conn_id`, or `PGREPL_DSN`); Airflow retries the task"
    retry = Retry.TIMED


class LoginError(SourceConnectionError):
    """The source rejected user, password or host (`pg_hba.conf`), and this process has never logged in with
    it. Without a password in the connection (`passfile`, `service`), it is a `SourceConnectionError`."""

    advice = "correct the connection, or the server's `pg_hba.conf`"
    retry = Retry.NEVER


class ServerSettingError(SourceError):
    """The server is not set up for logical replication, has no free slot or WAL sender, or is too old."""

    advice = "change the server's setting as the hint says"


class PrivilegeError(SourceError):
    """The role lacks a right. The message lists the missing rights."""

    advice = "grant the rights that the message or the hint names"


class TableError(SourceError):
    """A table is missing, is not a table, or has no usable key.

    If the snapshot app selects its tables, nothing is created.
    """

    advice = "correct the table or its name, or remove it from the pipeline's tables"
    scope = Scope.TABLE


class SlotError(SourceError):
    """The slot is missing, was invalidated or advanced, or belongs to another program or database.

    Changes may be missing.
    """

    advice = "check the connection. If the source is the right one, begin a new epoch"


class BusyError(SourceError):
    """Another process holds the slot, the pipeline's lock or a lock on a table. The message names it."""

    advice = "wait until that process has ended, or stop it"
    retry = Retry.TIMED


class PublicationError(SourceError):
    """The publication is missing, was recreated, belongs to another program, or would publish `_pgrepl`
    tables.
    """

    advice = (
        "begin a new epoch, or set `publication` to another name. If a publication `FOR ALL TABLES` would"
        " send [the package's tables](source-statements.md#subscribers-of-a-publication-for-all-tables) to"
        " other subscribers, use the statement in the hint"
    )


class SnapshotError(SourceError):
    """DDL or a timeout made the exported snapshot unusable for the copy.

    Nothing was committed. A retry exports a new one.
    """

    advice = "run the command again"
    retry = Retry.TIMED


class TableSnapshotError(SnapshotError):
    """The exported snapshot cannot be used for one table, which another statement locks or has altered.

    The copy is repeated under a new snapshot. After five tries, the table is errored.
    """

    advice = (
        "wait until the statement has ended, then resnapshot the table: `pgrepl snapshot FILE.json --tables"
        " NAME`"
    )
    scope = Scope.TABLE


class RewoundError(SourceError):
    """The source is another server, or was restored to an earlier state: the lake may have changes that the
    source lacks.
    """

    advice = "check the connection. If the source is the right one, begin a new epoch"


class UnsendableError(SourceError):
    """The server fails to send a transaction: text that cannot be converted to UTF-8, a value of more than 1
    GB as text, or an internal error ([types](types.md#what-the-server-cannot-send)). Earlier transactions
    are durable. The transaction is in the WAL, so every retry fails again.
    """

    advice = "[skip](skipping.md) the transaction"


class WireError(PgReplError):
    """Received bytes are not valid pgoutput, or text that is not UTF-8."""

    advice = "check that no proxy changes the connection's data; otherwise report a bug"


class ValueRangeError(PgReplError):
    """A lake type cannot hold a value. The message has column and type, never the value."""

    advice = (
        "follow the hint: change the column's setting or its lake type, then retry or resnapshot the table"
    )
    scope = Scope.TABLE


class DriftError(PgReplError):
    """The table's definition changed in a way that the lake table cannot follow."""

    advice = (
        "resnapshot the table: `pgrepl snapshot FILE.json --tables NAME`, or use the remedy in the hint"
        " ([drift](drift.md))"
    )
    scope = Scope.TABLE

    def __init__(self, message: str, hint: str = "", remedy: Remedy | None = Remedy.RESNAPSHOT) -> None:
        super().__init__(message, hint, remedy)


class IdentityError(PgReplError):
    """An UPDATE or DELETE does not identify the row that it changed, or an UPDATE that moved a row into the
    publication's [row filter](tables.md#row-filters-and-column-lists) lacks a value of it.
    """

    advice = "give the table a primary key or `REPLICA IDENTITY FULL`, then resnapshot it"
    scope = Scope.TABLE


class TruncatedError(PgReplError):
    """The table was truncated, and its `truncate` setting is `error`.

    The lake has all changes before the TRUNCATE.
    """

    advice = (
        "set `truncate` to `ignore` to keep the rows, or to `apply` to delete them, restart the replication"
        " app, and retry the table. A resnapshot replaces the rows ([policies](policies.md#truncate))"
    )
    scope = Scope.TABLE


class GapError(PgReplError):
    """Changes of the table are missing: a [skipped](skipping.md) transaction may have changed it."""

    advice = "resnapshot the table: `pgrepl snapshot FILE.json --tables NAME`"
    scope = Scope.TABLE


class ChangelogError(PgReplError):
    """The changelog is missing, has a newer layout, belongs to another pipeline, or lacks required data."""

    advice = "follow the hint; for a newer layout, install the version of this package that wrote it"


class NoChangelogError(ChangelogError):
    """There is no changelog: no snapshot has begun the first epoch."""

    advice = "run `pgrepl snapshot FILE.json`"


class ChangelogFileGoneError(ChangelogError):
    """A changelog file was deleted after it was listed and before it was read, because its hour was dropped
    or compacted; or the file is lost.
    """

    advice = (
        "run the command again, which lists the files again. If the error persists, restore the file, or"
        " resnapshot the lagging tables"
    )
    retry = Retry.TIMED


class FencedError(PgReplError):
    """Another process replaced this one, which ends at once."""

    advice = "nothing, if the other process is wanted; otherwise stop it"
    retry = Retry.TIMED


class StateError(PgReplError):
    """The `_pgrepl` schema cannot be used, a change of state is not allowed, or the schema has no record of
    a pipeline that has a lake.
    """

    advice = (
        "name the right state database, restore the schema, or begin a new epoch"
        " ([below](#another-source-lake-or-state))"
    )


class LakeError(PgReplError):
    """The lake cannot be used, belongs to another pipeline, or is missing although tables were copied into
    it.
    """

    advice = "mount the lake, or correct `lake` in the pipeline file"


class LakeUnavailableError(LakeError):
    """The lake's storage, or a catalog of its tables, is temporarily full or unreachable."""

    advice = "wait, or free space; then run the command again"
    retry = Retry.TIMED


class LakeTableError(LakeError):
    """A lake table is not in the state in which this pipeline left it, or has [a
    property](lake-layout.md#settings-of-other-programs) of another program with which it cannot be
    written.
    """

    advice = (
        "resnapshot the table: `pgrepl snapshot FILE.json --tables NAME`. For a property, run the statement"
        " in the hint, which removes it"
    )
    scope = Scope.TABLE


class LakeChangedError(LakeTableError):
    """Another program wrote the lake table, changed its columns, or restored an older copy of it."""

    advice = (
        "stop the other program, then resnapshot the table: `pgrepl snapshot FILE.json --tables NAME`. The"
        " resnapshot replaces the rows that the other program wrote. If you need them, first copy the table"
        " out of the lake; the hint names the versions"
    )


class OvertakenError(LakeTableError):
    """Another program, such as an OPTIMIZE, committed to the lake table while a change was applied.

    It did not change the position.
    """

    advice = "nothing: the app applies the change again automatically"
    retry = Retry.TIMED


class TargetError(PgReplError):
    """A broker rejects the login, the rights, the exchange or an event of a [publisher](publishers.md), or
    its URI cannot be parsed. The lake is not affected.
    """

    advice = "correct the publisher's settings or the broker's rights"


class MessageError(TargetError):
    """A broker delivers a message to a [client of creek's wire](../how-to/publish-to-nats.md) that is not in
    that format, or does not match its schema. Many messages name the
    subject.
    """

    advice = "check that only publishers of this format write to the subject"


class TargetUnavailableError(TargetError):
    """A broker is unreachable, full or blocked.

    A running publisher waits for it, and its changes stay in the changelog.
    """

    advice = "repair the broker"
    retry = Retry.TIMED


class TransformError(PgReplError):
    """A transform of a publisher fails, or returns something that cannot be sent.

    The table's events stop there.
    """

    advice = "fix the transform, then start the publisher again"
    scope = Scope.TABLE


class SparkError(PgReplError):
    """Spark failed to run the work, for example because its Python workers did not start on a busy host.

    No table caused the failure, and nothing in the lake has changed.
    """

    advice = "run the command again"
    retry = Retry.TIMED


class ToolError(PgReplError):
    """A required program is missing, or a library is older than the first supported version.

    Required are Java, Spark and jars, and on [executors](../how-to/run-on-a-cluster.md) the driver's
    packages ([deltalake](lake-layout.md#merge-on-read)).
    """

    advice = "follow the hint"


def resnapshot(table: object) -> str:
    """Return the hint for a table that needs a new copy. `table`: its name as in SQL."""
    return (
        f"resnapshot it: pgrepl snapshot FILE.json --tables '{table}', or PgResnapshotOperator (replaces also"
        " rows that only the lake has, as with deletes: soft)"
    )


def swapped(table: object, other: object) -> str:
    """Return the hint for two tables of a pipeline that swapped their names."""
    return (
        f"exchange {table} and {other} in every setting of the pipeline file that names one of them or a"
        " column of it (exclude_columns, per_table and so on). The settings must name both: an empty"
        " entry of per_table names one without special settings. Then resnapshot both:"
        f" pgrepl snapshot FILE.json --tables '{table},{other}', or PgResnapshotOperator"
    )


def named(hint: str, table: object) -> str:
    """Return a hint in which the table's name replaces NAME."""
    for words in ("--tables", "--add", "FILE.json"):
        hint = hint.replace(f"{words} NAME", f"{words} '{table}'")
    return hint


def retry(table: object) -> str:
    """Return the hint for an errored table that can continue when its cause is fixed."""
    return named(RETRY, table)


def errored(table: object, error: str = "", reason: str = "") -> str:
    """Return the sentence that a table is errored, with the class and the reason of its error if known."""
    return ": ".join(filter(None, (f"table {table} is errored", error, reason)))


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


def prove_source() -> str:
    """Return the hint for a source that may not be the lake's.

    It does not propose a new epoch: the user must first check which source this is.
    """
    return (
        "check the connection (conn_id, or PGREPL_DSN): the lake continues with the server that has all that"
        " the lake has. After a failover or a restore, or if the slot was dropped:"
        f" {reference('errors')}. Nothing was changed"
    )


def similar(unknown: Iterable[str], known: Collection[str], least: float = 0.6) -> list[str]:
    """Return the most similar known name of each unknown one that has any. `least`: a ratio of `difflib`."""
    return [near[0] for name in unknown if (near := get_close_matches(name, list(known), 1, least))]


def known_keys(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return the hint for unknown keys: a similar known key for each, or else all known keys."""
    meant = similar(unknown, known)
    if len(meant) == len(unknown):
        return f"did you mean {', '.join(map(repr, meant))}?"
    return f"known keys: {', '.join(known)}"
