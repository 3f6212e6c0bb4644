"""Comparison of source, lake and state, to determine whether all of them belong to this pipeline.

Names and paths are not compared, because another pipeline may use the same ones. Evidence is: the source's
system identifier and database OID, which the changelog and the state record; the IDs of the changelog and of
the state's record, which each stores of the other; and the database of the slot. Values that an earlier
version did not record are ignored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    ConfigError,
    LakeError,
    PgReplError,
    RewoundError,
    StateError,
)
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import is_at_rest, open_changelog, read_sequence
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_literal
from airflow_provider_pgrepl.replication.receiver.changelog_feed import RENEW_S
from airflow_provider_pgrepl.replication.receiver.continuity import (
    ahead_of_fork,
    history_error,
    missing_slot,
    promotion_error,
    slot_error,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.server import KnownSource, Server, known_source, source_of
from airflow_provider_pgrepl.replication.source.slot import PLUGIN, Slot
from airflow_provider_pgrepl.replication.state.database import PipelineRecord, StateDatabase

from .epoch import lost_lake, lost_state

_START = LSN(0)
_UNCHANGED = "Nothing was changed"
_CHECK_CONNECTION = (
    f"check the connection (conn_id, or PGREPL_DSN), and that this is the file meant. {_UNCHANGED}"
)
log = logging.getLogger(__name__)
_POLL_S = 5.0
_POLLS = int(RENEW_S * 1.25 / _POLL_S)


class Answer(Enum):
    """The result of a comparison: an object is the pipeline's, is not, or this cannot be determined."""

    OURS = "ours"
    NOT_OURS = "not ours"
    UNDETERMINED = "cannot tell"


@dataclass(frozen=True)
class Difference:
    """A contradiction in the evidence.

    `give_up_for_new_epoch`: the value of `--give-up` that allows a new epoch despite this contradiction;
    None if no value does. `give_up_for_teardown`: the value of `--give-up` that allows a teardown despite
    it: the name of a source whose identity matches but whose history, token or record does not. Empty if no
    value does.
    """

    answer: Answer
    error: PgReplError
    give_up_for_new_epoch: str | None = None
    give_up_for_teardown: str = ""


@dataclass(frozen=True)
class Evidence:
    """The identities of source, lake and state. None, or empty: could not be read, or does not exist.

    `slots`: the slots that changelog and state name, by name. `recorded_lake_id`: the ID of the changelog in
    the lake that the state records, if that is another lake than the pipeline file's. `recorded_lake_doubt`:
    why that lake may be there, although no changelog could be read in it. `missing_token`: the error of a
    source that lacks the token which it shares with the lake.

    `durable_lsn`: the LSN up to which changes of the source were received, from the changelog, or from the
    state if there is no changelog. `written_lsn`: the server's WAL position, read later. `torn_down`: a
    teardown gave up the lake's epoch. `lake_at_source`: if the state does not record the pipeline, the lake
    of the pipeline with this slot that the source's own database records. `token`: the changelog's, 0 if it
    has none. `fork_lsn`: where the source, a promoted standby, left the timeline that the changelog records.
    """

    pipeline: Pipeline
    server: Server | None = None
    slots: Mapping[str, Slot] = field(default_factory=dict)
    epoch: EpochRecord | None = None
    lake_id: str = ""
    recorded: PipelineRecord | None = None
    recorded_lake_id: str = ""
    recorded_lake_doubt: str = ""
    missing_token: PgReplError | None = None
    durable_lsn: LSN = _START
    written_lsn: LSN | None = None
    torn_down: bool = False
    lake_at_source: str = ""
    token: int = 0
    fork_lsn: LSN | None = None

    @property
    def is_promoted(self) -> bool:
        """Return True if the source is a promoted standby, and the changelog does not record that yet."""
        return self.fork_lsn is not None

    def describe(self) -> str:
        """Return the names of pipeline, source and lake, for logs and prompts."""
        source = "" if self.server is None else f", source {source_of(self.server)}"
        return f"pipeline {self.pipeline.name}{source}, lake {self.pipeline.lake_root}"


def compare(evidence: Evidence) -> tuple[Answer, PgReplError | None]:
    """Return the answer and the error of the first contradiction, or OURS and None."""
    for difference in differences(evidence):
        return difference.answer, difference.error
    return Answer.OURS, None


def check_ours(evidence: Evidence) -> None:
    """Raise the error of the first contradiction to source, lake and state being this pipeline's."""
    _, error = compare(evidence)
    if error is not None:
        raise error


def check_teardown(evidence: Evidence, give_up: frozenset[str]) -> None:
    """Raise the first contradiction, except doubts about a source that `give_up` names.

    Such doubts concern the history of a source, or a lost state.
    """
    for difference in differences(evidence):
        error = difference.error
        if difference.give_up_for_teardown and difference.give_up_for_teardown in give_up:
            continue
        if difference.give_up_for_teardown:
            raise type(error)(
                error.message,
                "check that connection, state and lake are the right ones. If they are, list what a teardown"
                f" drops: pgrepl teardown FILE.json --give-up {difference.give_up_for_teardown}, and drop it"
                f" with --yes; or set give_up of PgTeardownOperator. {_UNCHANGED}",
            )
        raise error


def check_acceptable(evidence: Evidence, name: str) -> bool:
    """Return True if the missing token of source `name` is the only contradiction.

    Returns False if the source has the token. Raises the error of any other contradiction, and ConfigError if
    `name` is not the name of the source.
    """
    check_ours(replace(evidence, missing_token=None))
    for difference in differences(evidence):
        if difference.give_up_for_teardown != name:
            raise ConfigError(
                f"{name} is not the name of the source that the lake was written from:"
                f" {difference.give_up_for_teardown}",
                f"{difference.error.hint}. If the server is that source and lost its tokens, repeat the"
                f" command with {difference.give_up_for_teardown}: {errors.reference('errors')}",
            )
        return True
    return False


def check_new_epoch(evidence: Evidence, give_up: frozenset[str]) -> None:
    """Raise the error that keeps a requested new epoch from beginning.

    That is a contradiction that no new epoch may replace, or ConfigError for one that is not named in
    `give_up`.
    """
    for difference in differences(evidence):
        if difference.give_up_for_new_epoch is None:
            raise difference.error
        if difference.give_up_for_new_epoch not in give_up:
            raise _would_abandon(difference.error, difference.give_up_for_new_epoch)


def check_lake_may_be_lost(evidence: Evidence, give_up: frozenset[str]) -> None:
    """Raise ConfigError if a new epoch would replace a lake that is missing at its recorded path.

    The lake may only be not mounted, and could never continue without the slot. `evidence` is complete: the
    changelog could be read, or does not exist.
    """
    recorded, root = evidence.recorded, evidence.pipeline.lake_root
    is_recorded = recorded is not None and recorded.lake == root and has_begun(evidence)
    if is_recorded and evidence.epoch is None and root not in give_up:
        raise _would_abandon(lost_lake(evidence.pipeline), root)


def _would_abandon(error: PgReplError, name: str) -> ConfigError:
    return ConfigError(
        f"a new epoch would abandon the current one: {error.message}",
        "check that connection and lake are the right ones. If they are, abandon it: pgrepl resync FILE.json"
        f" --give-up {name}, which compares every table with the lake, or pgrepl snapshot FILE.json"
        f" --new-epoch --give-up {name}, or set give_up of PgSnapshotOperator. {_UNCHANGED}",
    )


def differences(evidence: Evidence) -> Iterator[Difference]:
    """Yield all contradictions, the most significant ones first."""
    yield from _name(evidence)
    yield from _source_of_lake(evidence)
    yield from _source_of_record(evidence)
    yield from _lake_of_record(evidence)
    yield from _record_at_source(evidence)
    yield from _record_of_lake(evidence)


def _name(evidence: Evidence) -> Iterator[Difference]:
    epoch, pipeline = evidence.epoch, evidence.pipeline
    if epoch is not None and epoch.pipeline != pipeline.name:
        yield Difference(
            Answer.NOT_OURS,
            LakeError(
                f"the lake {pipeline.lake_root} belongs to the pipeline {epoch.pipeline!r}",
                f"give {pipeline.name!r} a lake root of its own. {_UNCHANGED}",
            ),
        )


def _source_of_lake(evidence: Evidence) -> Iterator[Difference]:
    server, epoch = evidence.server, evidence.epoch
    if server is None or epoch is None:
        return
    before = known_source(epoch, server, evidence.slots)
    if before.differs(server):
        yield Difference(
            Answer.NOT_OURS,
            RewoundError(
                f"the lake {evidence.pipeline.lake_root} was written from {before},"
                f" and the connection leads to another {before.kind_of(server)}: {source_of(server)}",
                _CHECK_CONNECTION,
            ),
            before.name,
        )
    elif evidence.fork_lsn is not None and evidence.durable_lsn > evidence.fork_lsn:
        # The token may be lost as well: it does not say which changes are.
        lost = ahead_of_fork(server, epoch, evidence.durable_lsn, evidence.fork_lsn)
        yield Difference(Answer.UNDETERMINED, lost, before.name, before.name)
    elif evidence.missing_token is not None:
        yield Difference(Answer.NOT_OURS, evidence.missing_token, before.name, before.name)
    else:
        yield from _history(evidence, server, before.name)


def _history(evidence: Evidence, server: Server, name: str) -> Iterator[Difference]:
    """Yield contradictions of the source's history and slot.

    They show a restored source, or a copy of the source since the last start, which has the token.
    """
    epoch, durable_lsn = evidence.epoch, evidence.durable_lsn
    written = durable_lsn if evidence.written_lsn is None else evidence.written_lsn
    if (rewound := history_error(server, written, epoch, durable_lsn, evidence.fork_lsn)) is not None:
        yield Difference(Answer.UNDETERMINED, rewound, name, name)
    if epoch is None or not has_begun(evidence):
        return
    slot = evidence.slots.get(epoch.slot)
    if slot is None or (slot.plugin, slot.database) != (PLUGIN, server.database):
        yield Difference(Answer.UNDETERMINED, missing_slot(epoch.slot, server), name, name)
    elif (moved := slot_error(slot, durable_lsn) or _promotion_error(evidence, server, slot)) is not None:
        yield Difference(Answer.UNDETERMINED, moved, name, name)


def _promotion_error(evidence: Evidence, server: Server, slot: Slot) -> PgReplError | None:
    """Return the error of a promoted standby that is not proven to be the source's."""
    if evidence.epoch is None or not evidence.is_promoted:
        return None
    return promotion_error(server, evidence.epoch, slot, evidence.token)


def has_begun(evidence: Evidence) -> bool:
    """Return True if the epoch's slot must exist.

    False after a teardown, which drops the slot, and while an epoch begins or after that was interrupted: the
    state's record then names the source but no lake.
    """
    recorded = evidence.recorded
    if recorded is None or evidence.torn_down:
        return False
    return bool(recorded.lake_id) or not recorded.database_oid


def _source_of_record(evidence: Evidence) -> Iterator[Difference]:
    server, recorded = evidence.server, evidence.recorded
    if server is None or recorded is None:
        return
    before = known_source(recorded, server, evidence.slots)
    if before.differs(server):
        yield Difference(
            Answer.NOT_OURS,
            StateError(
                f"pipeline {recorded.name} is recorded with {before}, and the connection leads to another"
                f" {before.kind_of(server)}: {source_of(server)}",
                "check the connections (conn_id, or PGREPL_DSN; state_conn_id, or PGREPL_STATE_DSN), and that"
                " this is the file meant: the record may be that of another pipeline with this name."
                f" {_UNCHANGED}",
            ),
            before.name,
        )
    elif evidence.epoch is None:
        yield from _history(evidence, server, before.name)


def _lake_of_record(evidence: Evidence) -> Iterator[Difference]:
    """Yield contradictions between the recorded lake and the pipeline file's lake.

    A lake that was moved keeps its changelog's ID. A copy has the same ID, but the original lake still
    exists.
    """
    recorded, root = evidence.recorded, evidence.pipeline.lake_root
    if recorded is None:
        return
    is_here = recorded.lake == root
    text = f"pipeline {recorded.name} is recorded with the lake {recorded.lake}"
    hint = (
        f"set `lake` back to {recorded.lake}, or check the state's connection (state_conn_id, or"
        f" PGREPL_STATE_DSN). {_UNCHANGED}"
    )
    if evidence.epoch is None:
        if not is_here:
            if not has_begun(evidence):
                hint = (
                    f"set `lake` back to {recorded.lake}. Nothing was copied there; to begin in {root}"
                    f" instead, set `lake` to {recorded.lake}, run pgrepl teardown FILE.json --yes, and then"
                    f" set `lake` to {root}. {_UNCHANGED}"
                )
            error = ConfigError(f"{text}, and the file names {root}, which has no changelog", hint)
            yield Difference(Answer.UNDETERMINED, error, recorded.lake)
    elif recorded.lake_id and recorded.lake_id != evidence.lake_id:
        where = f"that path now holds another lake (changelog {evidence.lake_id})"
        there = where if is_here else f"the file names {root}, which is another lake"
        yield Difference(Answer.NOT_OURS, ConfigError(f"{text}, and {there}", hint))
    elif not is_here and not recorded.lake_id:
        yield Difference(Answer.UNDETERMINED, ConfigError(f"{text}, and the file names {root}", hint))
    elif not is_here and evidence.recorded_lake_id == evidence.lake_id:
        error = ConfigError(f"{text}, which is still there, and the file names {root}, a copy of it", hint)
        yield Difference(Answer.UNDETERMINED, error)
    elif not is_here and evidence.recorded_lake_doubt:
        name = quote_literal(recorded.name)
        update = f"UPDATE _pgrepl.pipelines SET lake = {quote_literal(root)} WHERE name = {name}"  # noqa: S608
        error = ConfigError(
            f"{text}, which may still be there: {evidence.recorded_lake_doubt}. The file names {root}, which"
            " is that lake if it was moved, or a copy of it",
            f"let this host reach {recorded.lake}, or set `lake` back to it. If it was moved to {root}, run"
            f" in the state database: {update}. {_UNCHANGED}",
        )
        yield Difference(Answer.UNDETERMINED, error, recorded.lake)


def _record_at_source(evidence: Evidence) -> Iterator[Difference]:
    """Yield a contradiction if the source's own database records the pipeline, and the state database does
    not.

    The pipeline's apps hold their locks at the source.
    """
    server = evidence.server
    if server is None or evidence.recorded is not None or not evidence.lake_at_source:
        return
    error = StateError(
        f"the state database has no record of pipeline {evidence.pipeline.name}, but database"
        f" {server.database} of the source has one, with slot {evidence.pipeline.slot} and lake"
        f" {evidence.lake_at_source}",
        "remove the state connection (state_conn_id, or PGREPL_STATE_DSN), or point it to that database."
        f" {_UNCHANGED}",
    )
    name = source_of(server).name
    yield Difference(Answer.UNDETERMINED, error, name, name)


def _record_of_lake(evidence: Evidence) -> Iterator[Difference]:
    epoch, recorded = evidence.epoch, evidence.recorded
    if epoch is None:
        return
    if recorded is None:
        # A missing slot is no evidence of a teardown: a copy of the source has no slot.
        if epoch.slot in evidence.slots or not evidence.torn_down:
            name = KnownSource(epoch.system_identifier, epoch.database, epoch.database_oid).name
            yield Difference(Answer.UNDETERMINED, lost_state(evidence.pipeline, epoch), name, name)
    elif epoch.pipeline_id and epoch.pipeline_id != recorded.id and not evidence.torn_down:
        yield Difference(
            Answer.NOT_OURS,
            StateError(
                f"epoch {epoch.epoch} of the lake {evidence.pipeline.lake_root} was begun with another state"
                f" database: there the pipeline's id is {epoch.pipeline_id}, and here {recorded.id}",
                f"name the database that has it (state_conn_id, or PGREPL_STATE_DSN). {_UNCHANGED}",
            ),
            epoch.pipeline_id,
        )


def check_no_foreign_receiver(state_db: StateDatabase, pipeline: Pipeline) -> None:
    """Raise RewoundError if a receiver that holds no lock in this state database writes the lake.

    A receiver that holds the replication lock here may run.
    """
    try:
        state_db.lock(pipeline.name, "replicate")
    except BusyError:
        return
    try:
        check_no_receiver(pipeline)
    finally:
        state_db.unlock(pipeline.name, "replicate")


def check_no_receiver(pipeline: Pipeline, wait: Callable[[float], None] = time.sleep) -> None:
    """Raise RewoundError if a receiver writes the lake. The caller holds the replication lock.

    Unless the last receiver has ended cleanly, this waits for longer than a running one lets pass between two
    commits. Raises ChangelogError, LakeUnavailableError.
    """
    uri = changelog_uri(pipeline.lake_root)
    changelog = open_changelog(uri)
    if is_at_rest(changelog):
        return
    log.info(
        "the last receiver of lake %s did not shut down cleanly: checking for %g s whether it still commits",
        pipeline.lake_root,
        _POLLS * _POLL_S,
    )
    for _ in range(_POLLS):
        wait(_POLL_S)
        if read_sequence(open_changelog(uri)) != read_sequence(changelog):
            raise RewoundError(
                f"an app receives changes into the lake {pipeline.lake_root}, and holds no lock in"
                " this state database: this server is a copy of the source, or the state is another one",
                "check the connections (conn_id, or PGREPL_DSN; state_conn_id, or PGREPL_STATE_DSN). If they"
                " are right, stop that app, and run this again. Nothing was changed",
            )
