"""Teardown of a pipeline: removes everything that the pipeline created at its source."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError, PrivilegeError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.evidence import gather
from airflow_provider_pgrepl.replication.app.ownership import check_no_receiver, check_teardown, has_begun
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.own_tables import check_holds_no_lake
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.drop import (
    check_droppable,
    drop_lake_tables,
    drop_system_folder,
    foreign_files,
    present_tables,
)
from airflow_provider_pgrepl.replication.lake.history.table import is_history
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.continuity import slot_error
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import publication, slot
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.publication import drop_publication, read_identity
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot import Slot, check_none_lingers, drop_slot, read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.source_tokens import forget_tokens

from . import selection

log = logging.getLogger(__name__)


@dataclass
class TeardownResult:
    """The result of `teardown`: a phrase for each object that was dropped or kept.

    If it `is_dry_run`, the objects that would be dropped or kept.
    """

    is_dry_run: bool = field(default=False, compare=False)
    dropped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        drop, keep = ("would drop:", "would keep:") if self.is_dry_run else ("dropped:", "kept:   ")
        lines = [
            f"{label} {what}" for label, group in ((drop, self.dropped), (keep, self.kept)) for what in group
        ]
        return "\n".join(lines) or "nothing to drop"


def teardown(
    access: Access,
    drop_lake: bool = False,
    timeout_s: float = 60.0,
    *,
    dry_run: bool = False,
    give_up: Collection[str] = (),
) -> TeardownResult:
    """Drop the pipeline's slot, publication, event trigger, temporary slots and records.

    With `drop_lake` also its lake tables and changelog. Objects that the pipeline did not create are kept.
    Running processes are not ended: while an app or maintenance holds the pipeline's locks, or the slot is
    being read, this waits, for `timeout_s` seconds at most. The records are deleted last, so that an
    interrupted teardown can be repeated; objects that no longer exist are skipped. With `dry_run`, nothing is
    changed.

    Raises BusyError (run it again), SourceConnectionError, PrivilegeError. Before anything is dropped, raises
    what `ownership.differences` finds: StateError, RewoundError, ConfigError or LakeError for another source,
    state or lake than the pipeline's.

    :param give_up: the name of a source to tear down although it has another history than the lake, as after
        a restore
    """
    pipeline = access.pipeline
    role = f"teardown {pipeline.name}"
    with (
        access.source("teardown") as source,
        StateDatabase(access.state_dsn, role, access.started_by) as state_db,
    ):
        deadline, given_up = selection.Deadline(timeout_s), frozenset(give_up)
        work = _Teardown(pipeline, source, state_db, drop_lake, deadline, given_up)
        return work.run(dry_run=dry_run)


@dataclass
class _Teardown:
    pipeline: Pipeline
    source: Connection
    state_db: StateDatabase
    drop_lake: bool
    deadline: selection.Deadline
    give_up: frozenset[str] = frozenset()
    result: TeardownResult = field(default_factory=TeardownResult)
    _unmarked: str = ""

    def run(self, *, dry_run: bool) -> TeardownResult:
        self.result.is_dry_run = dry_run
        # Check before taking the locks: locks in another state database do not stop the apps of this
        # pipeline.
        self._check_place()
        if not dry_run:
            selection.lock_all(self.state_db, self.pipeline.name, self.deadline)
            self._check_place()
            if self._epoch is not None:
                check_no_receiver(self.pipeline)
        for step in (
            self._mark,
            self._slot,
            self._temporary_slots,
            self._event_trigger,
            self._publication,
            self._lake,
            self._state,
        ):
            step(dry_run)
        return self.result

    def _check_place(self) -> None:
        """Read the evidence, and raise an error unless source, lake and state belong to the pipeline.

        Without `drop_lake`, an unreadable lake counts as missing: ownership is then determined from the
        state. With `drop_lake`, also raises LakeError if a lake table may belong to another pipeline.
        """
        evidence = gather(self.pipeline, self.state_db, self.source, lake_may_fail=not self.drop_lake)
        check_teardown(evidence, self.give_up)
        if self.drop_lake:
            check_holds_no_lake(self.pipeline.lake_root)
        log.info("%s", evidence.describe())
        self._recorded, self._epoch = evidence.recorded, evidence.epoch
        # An interrupted teardown has marked the epoch, and may have dropped the slot: another program may
        # have created the next one of its name.
        stays = self._recorded is None or has_begun(replace(evidence, torn_down=False))
        self._slot_has_begun = self._epoch is not None and stays
        self._durable_lsn, self._token = evidence.durable_lsn, evidence.token
        if self.drop_lake:
            self._check_lake()

    def _check_lake(self) -> None:
        """Raise LakeError if there is no evidence that the lake, or a table in it, is this pipeline's."""
        root, name = self.pipeline.lake_root, self.pipeline.name
        if self._epoch is not None:
            check_droppable(root, self._tables(), name, self._copied() | self._named())
            return
        if self._copied():
            raise LakeError(
                f"nothing was dropped: tables of pipeline {name} were copied into the lake {root}, but there"
                " is no changelog in it. It is not mounted on this host, or was moved or deleted",
                "mount it and run this again; if the lake is gone, run teardown without --drop-lake",
            )

    def _slot(self, dry_run: bool) -> None:
        name = self._slot_name
        found = read_slot(self.source, name)
        reason = None if found is None else self._reason_to_keep(found)
        is_ours = self._is_ours(name, "slot")
        if found is not None and is_ours and reason is None:
            self._done(f"slot {name}")
        elif found is not None:
            why = f": {reason}" if reason else ""
            self.result.kept.append(f"slot {name}: not known to be this pipeline's{why}")
        if not dry_run and is_ours and reason is None:
            self.deadline.retry(lambda: drop_slot(self.source, name))
            if self._recorded is not None:  # another program may create the next slot of this name
                self.state_db.record_slot(self.pipeline.name, is_owned=False)

    def _reason_to_keep(self, found: Slot) -> str | None:
        reason = slot.reason_to_keep(self.source, found)
        if reason is None and self._slot_has_begun:
            # The slot was advanced, or created again under the same name.
            moved = slot_error(found, self._durable_lsn)
            reason = None if moved is None else moved.message
        return reason

    def _mark(self, dry_run: bool) -> None:
        """Mark the epoch in the lake as given up, before its slot is dropped.

        Without its slot the source looks like a copy of itself, to a repeated teardown and to a snapshot into
        the lake that stays. If the slot is not dropped after all, the next commit of a receiver makes the
        mark obsolete.
        """
        if self._epoch is None or dry_run:
            return
        try:
            writer.mark_torn_down(changelog_uri(self.pipeline.lake_root))
        except LakeUnavailableError as error:
            if self.drop_lake:
                raise
            self._unmarked = error.message

    def _temporary_slots(self, dry_run: bool) -> None:
        if not dry_run and self._is_known:
            self.deadline.retry(lambda: check_none_lingers(self.source, self.pipeline.name))

    def _event_trigger(self, dry_run: bool) -> None:
        former = [record.publication for record in (self._recorded, self._epoch) if record is not None]
        was_there = trigger.is_present(self.source, self.pipeline, former)
        for name, function in trigger.read_foreign(self.source, self.pipeline, former):
            self.result.kept.append(
                f"event trigger {name}, which this pipeline has not made: it calls {function}"
            )
        if read_server(self.source).in_recovery:
            if was_there:
                self.result.kept.append("the event trigger: run teardown with the primary as the source")
            return
        try:
            if dry_run:
                trigger.check_removable(self.source, self.pipeline, former)
            else:
                trigger.uninstall(self.source, self.pipeline, former)
        except PrivilegeError:
            self.result.kept.append(
                "the event trigger: a superuser must run the SQL that `pgrepl event-trigger-sql FILE.json"
                " --remove` prints"
            )
            return
        if was_there:
            self._done("the event trigger")

    def _publication(self, dry_run: bool) -> None:
        name = self._recorded.publication if self._recorded else self.pipeline.publication
        found = read_identity(self.source, name)
        if found is None:
            return
        oid = None if self._epoch is None else self._epoch.publication_oid
        reason = publication.reason_to_keep(self.source, name, self.pipeline.name, oid)
        if reason is not None or not self._owns_publication(name, found[0]):
            why = f": {reason}" if reason and self._is_ours(name, "publication") else ""
            self.result.kept.append(f"publication {name}, which this pipeline has not made{why}")
            return
        if read_server(self.source).in_recovery:
            self.result.kept.append(f"publication {name}: drop it on the primary")
            return
        if not dry_run:
            drop_publication(self.source, name, self.pipeline.lock_timeout_s)
        self._done(f"publication {name}")

    @property
    def _slot_name(self) -> str:
        return self._recorded.slot if self._recorded else self.pipeline.slot

    @property
    def _is_known(self) -> bool:
        """Return True if the state records the pipeline or, without a record, the lake names its slot."""
        return self._recorded is not None or self._is_ours(self._slot_name, "slot")

    def _is_ours(self, name: str, what: str) -> bool:
        """Return True if the state records the object as the pipeline's own or, without a record, the lake
        names it."""
        if self._recorded is not None:
            return bool(getattr(self._recorded, f"{what}_owned"))
        return self._epoch is not None and getattr(self._epoch, what) == name

    def _owns_publication(self, name: str, oid: int) -> bool:
        if self._recorded is None and (
            self.pipeline.publication_mode != "create"
            or not self._epoch
            or self._epoch.publication_oid != oid
        ):
            return False
        return self._is_ours(name, "publication")

    def _lake(self, dry_run: bool) -> None:
        root = self.pipeline.lake_root
        if not self.drop_lake:
            if self._epoch is not None:
                use = "a snapshot into it would begin a new epoch"
                if self._unmarked:
                    use = (
                        f"it could not be marked as torn down ({self._unmarked}). To use it again, run"
                        " pgrepl snapshot FILE.json --new-epoch, and again with the --give-up NAME it prints"
                    )
                self.result.kept.append(f"the lake {root}: {use}")
            return
        if self._epoch is None:
            return  # Nothing shows that its content is this pipeline's.
        tables = present_tables(root, self._tables())
        others = foreign_files(root, tables)
        if not dry_run:
            drop_lake_tables(root, tables)
            # Delete the tables' records, so that a repeated teardown does not take the dropped lake for one
            # that is not mounted.
            for table in self.state_db.read_tables(self.pipeline.name) if self._recorded else ():
                self.state_db.remove_table(self.pipeline.name, table)
            drop_system_folder(root)
        for table in tables:
            self._done(f"lake table {root}/{table.path}")
        self._done(f"the changelog of the lake {root}")
        self.result.kept += [f"{path}, which this pipeline has not written" for path in others]

    def _tables(self) -> set[TableName]:
        """Return all tables that the pipeline ever had in the lake, as far as state or points record them."""
        known = set(self.state_db.read_tables(self.pipeline.name)) if self._recorded else set()
        return known | self._named()

    def _named(self) -> set[TableName]:
        named = {key for point in ConsistentPoints(self.pipeline.lake_root).all() for key in point.tables}
        return {TableName.parse(key) for key in named if not is_history(key)}

    def _copied(self) -> set[TableName]:
        records = self.state_db.read_tables(self.pipeline.name) if self._recorded else {}
        return {table for table, record in records.items() if record.position_lsn is not None}

    def _state(self, dry_run: bool) -> None:
        if not dry_run:
            # A repeated teardown compares the tokens only with an epoch that is not marked.
            if not self._unmarked:
                self._forget_tokens()
            if self._recorded is not None:
                self.state_db.forget_pipeline(self.pipeline.name)
            if self._unmarked:
                self._forget_tokens()
            self.state_db.remove_schema()
        if self._recorded is not None:
            self._done(f"the records of pipeline {self.pipeline.name}")

    def _forget_tokens(self) -> None:
        if self._is_known and not read_server(self.source).in_recovery:
            forget_tokens(self.source, self._slot_name, self._token)

    def _done(self, what: str) -> None:
        self.result.dropped.append(what)
