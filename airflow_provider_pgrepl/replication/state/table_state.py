"""The states of a table, and which may follow which."""

from __future__ import annotations

from enum import StrEnum

from airflow_provider_pgrepl.errors import StateError


class TableState(StrEnum):
    """Where a table is on its way from the source into the lake.

    pending       set by the snapshot app when the table joins the pipeline; nothing is in the lake yet.
    snapshotting  set by the snapshot app before the first byte is copied. If the snapshot fails, the table is
                  errored, or has its earlier state if nothing was copied yet. After a kill it stays here
                  until the snapshot app runs again.
    catching_up   set by the snapshot app when the copy is committed at its position; changes after it are
                  still to be applied. Also set by an operator who resumes a paused table, or has an errored
                  one tried again.
    streaming     set by the replicate app when the table has applied all that the others have.
    errored       set by whoever met the error, with its class, reason, hint and LSN: this table stops, the
                  others and the slot go on. The way out is the snapshot app, which resnapshots the table, or
                  an operator who has it tried again when the cause is gone.
    paused        set by an operator; changes are kept in the changelog and not applied.
    removed       set by an operator, or by the snapshot app when the table is no longer in the pipeline's
                  configuration; its lake table stays as it is.
    """

    PENDING = "pending"
    SNAPSHOTTING = "snapshotting"
    CATCHING_UP = "catching_up"
    STREAMING = "streaming"
    ERRORED = "errored"
    PAUSED = "paused"
    REMOVED = "removed"


_S = TableState
_FOLLOWERS: dict[TableState | None, frozenset[TableState]] = {
    None: frozenset({_S.PENDING}),
    _S.PENDING: frozenset({_S.SNAPSHOTTING}),
    _S.SNAPSHOTTING: frozenset({_S.CATCHING_UP}),
    _S.CATCHING_UP: frozenset({_S.STREAMING, _S.SNAPSHOTTING}),
    _S.STREAMING: frozenset({_S.SNAPSHOTTING}),
    _S.ERRORED: frozenset({_S.SNAPSHOTTING, _S.CATCHING_UP}),
    _S.PAUSED: frozenset({_S.CATCHING_UP}),
    _S.REMOVED: frozenset({_S.PENDING}),
}
_FROM_ANYWHERE = frozenset({_S.ERRORED, _S.PAUSED, _S.REMOVED})


def may_follow(now: TableState | None, wanted: TableState) -> bool:
    """Whether a table in `now` (None: unknown so far) may be put into `wanted`; the same state always may."""
    if now is None:
        return wanted in _FOLLOWERS[None]
    return wanted == now or wanted in _FROM_ANYWHERE or wanted in _FOLLOWERS[now]


def check_transition(now: TableState | None, wanted: TableState, table: str) -> None:
    """Raises StateError, naming the table, when `wanted` may not follow `now`."""
    if not may_follow(now, wanted):
        raise StateError(f"{table}: is {now or 'unknown'}, and cannot become {wanted}")


def states_before(wanted: TableState) -> frozenset[TableState]:
    """All states from which `wanted` may be reached in one step."""
    return frozenset(state for state in TableState if may_follow(state, wanted))
