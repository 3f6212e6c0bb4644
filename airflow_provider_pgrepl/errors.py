"""Every error of this package, in one tree.

Each class says whether trying again can help (`retry`) and how much stops (`scope`)::

    PgReplError
    ├─ ConfigError                 the pipeline file or an argument is wrong
    ├─ SourceError                 PostgreSQL
    │  ├─ SourceConnectionError    cannot be reached, or the login is refused (retry)
    │  ├─ ServerSettingError       wal_level, no free slot or sender, version
    │  ├─ PrivilegeError           a right is missing
    │  ├─ TableError               missing, not a table, no usable key        (table)
    │  ├─ SlotError                missing, invalidated, somebody else's
    │  ├─ BusyError            in use by another process                  (retry)
    │  ├─ PublicationError         missing, re-made, somebody else's
    │  ├─ SnapshotError            the exported snapshot cannot be used       (retry)
    │  │  └─ TableSnapshotError    likewise, for one table only               (retry, table)
    │  ├─ RewoundError             the source is not the one, or not at the point, it was
    │  └─ UnsendableError          a transaction that the server itself fails to send
    ├─ WireError                   bytes that are not pgoutput
    ├─ ValueRangeError             a value that its lake type cannot hold     (table)
    ├─ DriftError                  the table changed its shape                (table)
    ├─ IdentityError               changes do not tell which row was changed  (table)
    ├─ TruncatedError              TRUNCATE, where `truncate` is `error`      (table)
    ├─ GapError                    a transaction was skipped that may have changed it  (table)
    ├─ ChangelogError              the changelog is newer, or lacks what is needed
    │  ├─ NoChangelogError         there is none yet
    │  └─ ChangelogFileGoneError   a file of it went while it was read        (retry)
    ├─ FencedError                 another process took this one's place      (retry)
    ├─ StateError                  the `_pgrepl` schema
    ├─ LakeError                   the lake cannot be reached or is somebody else's
    │  ├─ LakeUnavailableError     cannot be read or written just now         (retry)
    │  └─ LakeTableError           one lake table                             (table)
    │     ├─ LakeChangedError      somebody else has written it               (table)
    │     └─ OvertakenError        another program committed meanwhile        (retry, table)
    ├─ TargetError                 a broker refuses a publisher, or what it sends
    │  ├─ MessageError             a broker delivers what is no message of the wire
    │  └─ TargetUnavailableError   is away, full or blocked just now          (retry)
    ├─ TransformError              a transform of a publisher fails           (table)
    ├─ SparkError                  Spark failed at running our work           (retry)
    └─ ToolError                   a program that is needed is missing, or a library too old

Messages carry names, LSNs and counts, never a row's values and never a password.
All classes survive pickling, because Spark and Airflow carry them between processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from enum import Enum, StrEnum
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_DOCUMENTS = _PACKAGE / "documents" / "docs"
"""Where a wheel carries them."""
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
    """A text without what a terminal obeys or hides: control characters, and those that turn the direction of
    writing. Names hold whatever their makers put there. Line breaks and tabs stay; a name has none of its own
    where it is shown by `names.show_identifier` or `one_line`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escape(letter) for letter in text)


def one_line(text: str) -> str:
    """Likewise, for a text from elsewhere that is to stay within its line."""
    return "".join(letter if letter.isprintable() else _escape(letter) for letter in text)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


class Retry(Enum):
    """Whether running the same thing again can help."""

    TIMED = "retry may help"
    NEVER = "will not help"


class Scope(Enum):
    """How much an error stops."""

    TABLE = "table"
    PIPELINE = "pipeline"


class Remedy(StrEnum):
    """What somebody has to do about a table that stopped. Its record keeps this; a hint says it to people."""

    RESNAPSHOT = "resnapshot"
    """Resnapshot it."""
    UNDO = "undo"
    """Set it back at the source, and retry it."""
    MOVED = "moved"
    """Name it back, and retry it."""
    ADDED = "added"
    """Take it under its new name."""
    PUBLISH = "publish"
    """Put it into the publication again, and resnapshot it."""
    GONE = "gone"
    """Remove it; or create it again, and resnapshot it."""
    POLICY = "policy"
    """Let its lake table follow, and retry it."""
    LOGGED = "logged"
    """Make it an ordinary, logged table, and resnapshot it."""
    CHOICE = "choice"
    """Mend the column or the choice, and retry it."""
    GRANT = "grant"
    """Give the role its rights back, and retry it."""

    @property
    def allows_retry(self) -> bool:
        """Whether the table can go on without a new copy once this is done."""
        return self in (Remedy.UNDO, Remedy.MOVED, Remedy.POLICY, Remedy.CHOICE, Remedy.GRANT)


class PgReplError(Exception):
    """Root of the tree: what happened, and what to do next (`hint`).

    `remedy`: what to do next as programs read it, where they go by it. `trace`: classes and frames of the
    unexpected exception in whose place it is raised, if it is (`trace.traced`).
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
    """Something about the source database."""


class SourceConnectionError(SourceError):
    """The source cannot be reached, or refused the login."""

    retry = Retry.TIMED


class ServerSettingError(SourceError):
    """The server is not set up for logical replication, or is full."""


class PrivilegeError(SourceError):
    """The role lacks a right; the message lists exactly what."""


class TableError(SourceError):
    """A table cannot be replicated."""

    scope = Scope.TABLE


class SlotError(SourceError):
    """The slot is missing, invalidated, was moved, or is somebody else's."""


class BusyError(SourceError):
    """The slot, or the pipeline's lock, is held by another process."""

    retry = Retry.TIMED


class PublicationError(SourceError):
    """The publication is missing, was created again, or is somebody else's; or it would send our tables."""


class SnapshotError(SourceError):
    """The exported snapshot cannot be used; a new one may."""

    retry = Retry.TIMED


class TableSnapshotError(SnapshotError):
    """The exported snapshot cannot be used for one table, which a statement needs or has altered."""

    scope = Scope.TABLE


class RewoundError(SourceError):
    """The source is another server, or was restored to an earlier state."""


class UnsendableError(SourceError):
    """The server itself fails to send a transaction; it stands in the WAL, and fails again each time."""


class WireError(PgReplError):
    """Bytes that are not what pgoutput sends."""


class ValueRangeError(PgReplError):
    """A value that its lake type cannot hold; names column and type, never the value."""

    scope = Scope.TABLE


class DriftError(PgReplError):
    """The table's shape is no longer the recorded one."""

    scope = Scope.TABLE

    def __init__(self, message: str, hint: str = "", remedy: Remedy | None = Remedy.RESNAPSHOT) -> None:
        super().__init__(message, hint, remedy)


class IdentityError(PgReplError):
    """Changes of the table do not tell which row was changed."""

    scope = Scope.TABLE


class TruncatedError(PgReplError):
    """The table was truncated, and its policy is to stop then."""

    scope = Scope.TABLE


class GapError(PgReplError):
    """Changes of the table are missing: a transaction was skipped that may have changed it."""

    scope = Scope.TABLE


class ChangelogError(PgReplError):
    """The changelog is missing, of a newer layout, or lacks something that is needed."""


class NoChangelogError(ChangelogError):
    """There is no changelog: no epoch has begun."""


class ChangelogFileGoneError(ChangelogError):
    """A changelog file is not there: its hour was dropped or joined since it was listed, or it is lost."""

    retry = Retry.TIMED


class FencedError(PgReplError):
    """Another process took this one's place; this one must end at once."""

    retry = Retry.TIMED


class StateError(PgReplError):
    """The `_pgrepl` schema cannot be used."""


class LakeError(PgReplError):
    """The lake cannot be reached, or belongs to another pipeline."""


class LakeUnavailableError(LakeError):
    """The lake's storage, or a catalog of its tables, refuses just now: full, or out of reach."""

    retry = Retry.TIMED


class LakeTableError(LakeError):
    """One lake table is not as this pipeline left it."""

    scope = Scope.TABLE


class LakeChangedError(LakeTableError):
    """Somebody else has written a lake table: its version or its columns are not this pipeline's."""


class OvertakenError(LakeTableError):
    """Another program committed to a lake table while this one did, and did not move the position."""

    retry = Retry.TIMED


class TargetError(PgReplError):
    """A broker refuses a publisher of events: its login, its rights, its exchange."""


class MessageError(TargetError):
    """What a broker delivers is none of creek's messages, or of another schema than it says."""


class TargetUnavailableError(TargetError):
    """A broker is away, or takes nothing just now."""

    retry = Retry.TIMED


class TransformError(PgReplError):
    """A transform of a publisher fails, or makes of a change what cannot be sent."""

    scope = Scope.TABLE


class SparkError(PgReplError):
    """Spark itself failed: no table is at fault, and nothing in the lake has changed."""

    retry = Retry.TIMED


class ToolError(PgReplError):
    """A program that is needed (Java, Spark, jars; on executors this package) is missing, or a library is
    older than the first version that is right."""


def resnapshot(table: object) -> str:
    """For a table that only a new copy sets right. `table`: its name as people write it."""
    return f"resnapshot it: pgrepl snapshot FILE.json --tables '{table}', or PgResnapshotOperator"


def named(hint: str, table: object) -> str:
    """Return a hint with the name of its table where it says NAME."""
    return hint.replace("--tables NAME", f"--tables '{table}'").replace("--add NAME", f"--add '{table}'")


def add(table: object) -> str:
    """For a table that is not the pipeline's, or no longer."""
    return f"add {table}: pgrepl snapshot FILE.json --add '{table}', or PgAddTablesOperator"


def remove(*tables: object) -> str:
    """For tables that are not to be replicated any more, of which the command takes each as an argument."""
    quoted = " ".join(f"'{table}'" for table in tables)
    return f"pgrepl remove FILE.json {quoted}, or PgRemoveTablesOperator"


def rename_settings(table: object, new: object) -> str:
    """For a table that has another name, and settings of the pipeline file that go by its old one."""
    return (
        f"change {table} to {new} in every setting of the pipeline file that names it or a column of it"
        " (exclude_columns, per_table and so on)"
    )


def reference(page: str) -> str:
    """Where the reference has more: its place on this machine, or in a checkout."""
    folder = str(_DOCUMENTS) if _DOCUMENTS.is_dir() else "docs"
    return f"see {folder}/reference/{page}.md"


def prove_source() -> str:
    """For a source that may be another one than the lake's: no new epoch is proposed before that is clear."""
    return (
        "check the connection (conn_id, or PGREPL_DSN): the lake continues with the server that has all that"
        " the lake has. After a failover or a restore, or if the slot was dropped:"
        f" {reference('errors')}. Nothing was changed"
    )


def known_keys(unknown: Sequence[str], known: Collection[str]) -> str:
    """For keys that there are not: those that look like them, else all."""
    meant = [near[0] for key in unknown if (near := get_close_matches(key, list(known), 1))]
    if len(meant) == len(unknown):
        return f"did you mean {', '.join(map(repr, meant))}?"
    return f"known keys: {', '.join(known)}"
