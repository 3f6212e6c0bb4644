"""Writing the changelog: parts first, then one commit that makes them count.

Whoever writes commits under the receiver's app id. A successor's fence, a commit under the same app id, is
where it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from airflow_provider_pgrepl.errors import FencedError, LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.changelog.layout import (
    AT_REST_APP,
    DURABLE_APP,
    EPOCH_APP,
    LAKE_APP,
    METADATA_KEY,
    PARTITION,
    PUBLISHED_APP,
    RECEIVER_APP,
    SHARED_APP,
    TABLE_SCHEMA,
    TORN_DOWN_APP,
    CommitRecord,
    EpochRecord,
)
from airflow_provider_pgrepl.replication.changelog.parts import Part, PartFolder
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_sequence, read_token
from airflow_provider_pgrepl.replication.delta import recovery
from airflow_provider_pgrepl.replication.delta.log import added_action
from airflow_provider_pgrepl.replication.delta.own_commit import commit_token, committing
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, TakenOverError
from airflow_provider_pgrepl.replication.delta.table import create_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import durable, is_refusal, refusal

_NOT_OURS = (PermissionError, NotADirectoryError, FileExistsError)
# 86,400 commits a day: checkpoints are for opening the table, which reads all commits since the last one,
# in a store by a GET each; and each costs a rewrite of the file list.
_CHECKPOINT_EVERY = 200
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": str(_CHECKPOINT_EVERY),
    "delta.logRetentionDuration": "interval 30 days",
    "delta.enableExpiredLogCleanup": "false",
    # Of which each part has bounds: readers take any other column without them for one that never matches.
    "delta.dataSkippingStatsColumns": "epoch,commit_lsn,relation_id,commit_ts",
}


def create_changelog(uri: str, record: EpochRecord, token: int = 0, former_lake: str = "") -> None:
    """Make the changelog with its first epoch, in one commit. `token`: the source's, 0 where it has none.
    `former_lake`: the id of a lost changelog, of which the tables in the lake are.

    Raises LakeUnavailableError when the storage is full or away, LakeError when it cannot be there.
    """
    try:
        create_delta(
            uri,
            TABLE_SCHEMA,
            _TABLE_PROPERTIES,
            _epoch_properties(record, 1, token, former_lake),
            partition_by=[PARTITION],
            description=record.to_json(),
        )
    except (DeltaError, OSError) as error:
        if is_refusal(error) and not isinstance(error, _NOT_OURS):
            raise refusal(f"the changelog cannot be created under {uri}", error) from error
        raise LakeError(
            f"the changelog cannot be created under {uri}: {error.__class__.__name__}",
            "check that the lake path exists, is writable and is not used by something else",
        ) from error


def begin_epoch(uri: str, record: EpochRecord, token: int = 0) -> None:
    """Begin a new history in an existing changelog, in one commit that also fences any running receiver.

    `token`: the source's, 0 where it has none.
    """
    table = open_changelog(uri)
    sequence = (table.transaction_version(RECEIVER_APP) or 0) + 1
    try:
        properties = _epoch_properties(record, sequence, token)
        with committing(table, properties):
            table.alter.set_table_description(record.to_json(), commit_properties=properties)
        durable.flush_newest(uri)
    except CommitFailedError as error:
        raise FencedError("the changelog was written to while a new epoch began; run it again") from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def describe(uri: str, record: EpochRecord) -> None:
    """Write the record of the epoch that goes on, with more in it than before; ends any running receiver.

    Raises ChangelogError, FencedError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    try:
        table.alter.set_table_description(record.to_json())
        durable.flush_newest(uri)
    except CommitFailedError as error:
        raise FencedError("the changelog was written to while its record was completed") from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def _epoch_properties(
    record: EpochRecord, sequence: int, token: int, former_lake: str = ""
) -> CommitProperties:
    commit = CommitRecord("epoch", record.epoch, record.consistent_point)
    return CommitProperties(
        custom_metadata={**commit.to_metadata(), **commit_token()},
        app_transactions=[
            Transaction(RECEIVER_APP, sequence),
            Transaction(SHARED_APP, token),
            *([Transaction(f"{LAKE_APP}{former_lake}", 1)] if former_lake else []),
            Transaction(AT_REST_APP, sequence),
            *_apps(commit, 0),
        ],
    )


def _apps(commit: CommitRecord, published: int) -> list[Transaction]:
    return [
        Transaction(EPOCH_APP, commit.epoch),
        Transaction(PUBLISHED_APP, published),
        # The last that is written, by which a commit is known to be whole.
        Transaction(DURABLE_APP, commit.durable_lsn),
    ]


def mark(uri: str, marks: Mapping[str, int] | None = None) -> None:
    """Commit no data, so that the version moves and the applier looks at its tables again.

    `marks`: versions of app ids that the commit sets. Does nothing if commits of a receiver, which may come
    faster than a marker, move the version meanwhile. Raises ChangelogError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    version = int(table.version())
    try:
        _commit_marker(uri, table, [Transaction(*one) for one in (marks or {}).items()])
    except CommitFailedError as error:
        if int(open_changelog(uri).version()) <= version:
            raise _unwritable(error) from error
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def mark_torn_down(uri: str) -> None:
    """Write down that a teardown gives up the epoch, whose source may then lack slot, token and state.

    A receiver that goes on all the same leaves it behind. Raises ChangelogError, LakeUnavailableError.
    """
    table = open_changelog(uri)
    try:
        _commit_marker(uri, table, [Transaction(TORN_DOWN_APP, read_sequence(table))])
    except (DeltaError, OSError) as error:
        raise _unwritable(error) from error


def _commit_marker(uri: str, table: DeltaTable, apps: list[Transaction] | None = None) -> None:
    commit = CommitRecord(
        "marker",
        Epoch(table.transaction_version(EPOCH_APP) or 0),
        LSN(table.transaction_version(DURABLE_APP) or 0),
    )
    table.create_write_transaction(
        [],
        mode="append",
        schema=table.schema(),
        partition_by=[PARTITION],
        commit_properties=CommitProperties(custom_metadata=commit.to_metadata(), app_transactions=apps),
    )
    # With what a writer before it may have left: only so many commits are looked at later.
    durable.flush_newest(uri)


def find_torn_changelog(uri: str) -> recovery.Torn:
    """What the receiver was committing when the machine stopped: the slot keeps it.

    Raises LakeError, LakeUnavailableError.
    """
    return recovery.find_torn(uri, RECEIVER_APP, _is_whole)


def _is_whole(actions: recovery.Actions) -> bool:
    """Of a receiver's commit the durable LSN is written last."""
    about: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    if METADATA_KEY not in about:
        return True
    commit = CommitRecord.from_json(about[METADATA_KEY])
    apps = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
    return commit.kind == "marker" or apps.get(DURABLE_APP) == commit.durable_lsn


RenewToken = Callable[[int, EpochRecord, LSN], int]
"""Gives a new token for that of the changelog, whose epoch and durable LSN these are."""


class ChangelogWriter:
    """The one writer. Opening it commits a fence; after that `durable_lsn` is what the changelog holds.

    `after`: the `sequence` of a writer that this one continues. `renew_token`: gives the fence's token for
    that of the changelog, which the source is seen to have. Raises ChangelogError when there is no changelog,
    FencedError when another writer took over, or had done so since that one, LakeUnavailableError when the
    storage refuses, and what `renew_token` does.
    """

    def __init__(self, uri: str, after: int | None = None, renew_token: RenewToken | None = None) -> None:
        self._uri = uri
        table = open_changelog(uri)
        self._parts = PartFolder(uri)
        self.epoch_record = EpochRecord.from_json(table.metadata().description)
        try:
            self._log = AppLog(uri, table, RECEIVER_APP, _CHECKPOINT_EVERY)
        except OSError as error:
            raise _unwritable(error) from error
        if after is not None and self.sequence != after:
            raise _fenced()
        self.durable_lsn = LSN(table.transaction_version(DURABLE_APP) or 0)
        self.published = table.transaction_version(PUBLISHED_APP) or 0
        """A hash of what decides what is published, as each commit from here on says it; 0 when none does."""
        self.token = read_token(table)
        """That of the last fence, or of the last renewal; 0 where the source has none."""
        # Of the table that was opened: the fence is refused if another one came since.
        before = self.token
        fresh = before if renew_token is None else renew_token(before, self.epoch_record, self.durable_lsn)
        self._flush_earlier()
        fence = CommitRecord("fence", self.epoch, self.durable_lsn)
        self._commit([], fence, [Transaction(SHARED_APP, fresh)] if fresh != before else ())
        self.token = fresh

    @property
    def epoch(self) -> Epoch:
        return self.epoch_record.epoch

    @property
    def sequence(self) -> int:
        """How often the changelog has been written, by whoever it was, as of this writer's last commit."""
        return self._log.sequence

    @property
    def version(self) -> int:
        """The Delta version of this writer's last commit."""
        return self._log.version

    def write_part(self, rows: pa.Table) -> Part:
        """Write rows (ROW_SCHEMA, in stream order) as one Parquet file, sorted by relation; it is on the disk
        when this returns. Raises LakeUnavailableError.
        """
        try:
            return self._parts.write(rows)
        except OSError as error:
            raise _unwritable(error) from error

    def append(
        self,
        parts: Sequence[Part],
        *,
        durable_lsn: LSN,
        first_lsn: LSN,
        last_lsn: LSN,
        last_commit_us: int,
        kind: Literal["data", "gap"] = "data",
    ) -> None:
        """Make whole transactions durable, or that one was skipped: all parts in one commit.

        Raises FencedError or LakeUnavailableError.
        """
        relations = frozenset[int]().union(*(part.relations for part in parts))
        commit = CommitRecord(
            kind,
            self.epoch,
            durable_lsn,
            first_lsn,
            last_lsn,
            last_commit_us,
            tuple(sorted(relations)),
            sum(part.value_bytes for part in parts),
            sum(part.rows for part in parts),
        )
        self._commit([added_action(part.add_action()) for part in parts], commit)

    def append_between(self, rows: pa.Table) -> None:
        """Commit rows that no transaction brought, to stand between what is durable and what follows.

        Raises FencedError or LakeUnavailableError.
        """
        place = self.durable_lsn
        self.append(
            [self.write_part(rows)], durable_lsn=place, first_lsn=place, last_lsn=place, last_commit_us=0
        )

    def record_keepalive(self, lsn: LSN) -> None:
        """Record, by a commit without data, that nothing of ours was committed up to `lsn`."""
        self._commit([], CommitRecord("keepalive", self.epoch, lsn))

    def give_sign_of_life(self, token: int) -> None:
        """Commit no change, so that others see that this writer is at work. `token`: a new one of the source,
        which has the last one as well."""
        apps = [Transaction(SHARED_APP, token)] if token != self.token else []
        self._commit([], CommitRecord("keepalive", self.epoch, self.durable_lsn), apps)
        self.token = token

    def rest(self) -> None:
        """Record that this writer ends, as its last commit."""
        commit = CommitRecord("keepalive", self.epoch, self.durable_lsn)
        self._commit([], commit, [Transaction(AT_REST_APP, self.sequence + 1)])

    def _flush_earlier(self) -> None:
        """What a writer committed that died before it was on the disk counts from now on."""
        try:
            durable.flush_newest(self._uri)
        except OSError as error:
            raise _unwritable(error) from error

    def _commit(
        self, actions: list[dict[str, Any]], commit: CommitRecord, more_apps: Iterable[Transaction] = ()
    ) -> None:
        # The durable LSN last.
        apps = [*more_apps, *_apps(commit, self.published)]
        try:
            # The parts are on the disk already.
            self._log.commit("WRITE", actions, told=commit.to_metadata(), apps=apps, with_files=False)
        except TakenOverError:
            raise _fenced() from None
        except (DeltaError, OSError) as error:
            raise _unwritable(error) from error
        self.durable_lsn = commit.durable_lsn


def _fenced() -> FencedError:
    return FencedError("another receiver took over the changelog; this one stops")


def _unwritable(error: Exception) -> LakeUnavailableError:
    return refusal("the changelog cannot be written", error)
