"""The recorded values of a source's sequences, as a status shows them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.app.sequences import RecordedSequences
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint
from airflow_provider_pgrepl.replication.lake.sequences import read_recorded
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

_LATE_S = 300.0
"""The age in seconds from which values from before the last consistent point are a problem."""


@dataclass(frozen=True)
class SequencesStatus:
    """The recorded values: their number, and the point up to which all of them are valid.

    `recorded_at`: the time of the oldest reading, by the source's clock.
    """

    count: int
    epoch: int
    lsn: LSN
    recorded_at: datetime


def read_sequences_status(
    pipeline: Pipeline, epoch: EpochRecord | None, point: ConsistentPoint | None, now: datetime
) -> tuple[SequencesStatus | None, tuple[str, ...]]:
    """Return the status, None without recorded values, and the problems as sentences.

    :param epoch: the present epoch
    :param point: its newest consistent point
    """
    if not pipeline.sequences or epoch is None:
        return None, ()
    try:
        values = read_recorded(pipeline.lake_root).values
    except LakeError as error:
        return None, (error.message,)
    if not values:
        return None, ()
    found = RecordedSequences(values, epoch.epoch, None if point is None else LSN(point.lsn))
    oldest = found.oldest
    status = SequencesStatus(len(values), oldest.epoch, oldest.lsn, oldest.recorded_at)
    # Sequences without a value are named by what is asked from the source, with the GRANT to run.
    is_late = oldest.epoch < found.epoch or (now - oldest.recorded_at).total_seconds() >= _LATE_S
    return status, (f"sequences: {found.problem}",) if found.problem and is_late else ()
