"""Fault: why a reader of changes stopped before one of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import (
    GapError,
    LakeUnavailableError,
    PgReplError,
    TransformError,
    ValueRangeError,
)
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.trace import log_unexpected, traced

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """Reading stopped before the change, or the transaction, at `position`, of these tables; `is_of_all`: of
    no table alone, since transactions are not given in part."""

    error: PgReplError
    position: EventPosition
    relations: frozenset[int]
    is_of_all: bool = False


def gap_error(gap: EventPosition) -> GapError:
    """A skipped transaction."""
    return GapError(
        f"the transaction at {gap.commit_lsn}, which the server could not send, was skipped: no one has its"
        " changes",
        "read the tables from the lake once they are resnapshotted",
    )


def for_readers(fault: Fault) -> PgReplError:
    """A fault's error, as who reads changes in Python is told: after what to go on."""
    error, place = fault.error, fault.position
    mend = "give the pipeline instead of its lake root, with the column in text_columns"
    hint = mend if isinstance(error, ValueRangeError) else error.hint
    what = "transaction" if place.is_after_transaction else "change"
    return type(error)(error.message, f"{hint}; to go on without this {what}: after={str(place)!r}")


def too_many_changes(place: EventPosition, most: int) -> TransformError:
    """A transaction that is to be given as a whole."""
    return TransformError(
        f"the transaction at {place.commit_lsn} has more than {most:,} changes, and a function is given all"
        " of a transaction at once",
        "raise transaction_changes of the publisher, for which it needs the memory",
    )


@contextmanager
def changelog_errors() -> Iterator[None]:
    """Whatever a storage, Delta, Parquet or DataFusion raises, without its text: that may hold values."""
    failed: LakeUnavailableError | None = None
    try:
        yield
    except PgReplError:
        raise
    except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones
        doing = "the changelog cannot be read"
        log_unexpected(log, doing, error)
        failed = traced(
            LakeUnavailableError(
                f"{doing}: {type(error).__name__}",
                "check the lake's storage; reading goes on where it stopped",
            ),
            error,
        )
    if failed is not None:
        raise failed
