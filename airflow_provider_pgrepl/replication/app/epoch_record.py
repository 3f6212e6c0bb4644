"""The epoch that a pipeline's lake is in, as its changelog says."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import LakeError, NoChangelogError
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def find_epoch(pipeline: Pipeline) -> EpochRecord | None:
    """The present epoch; None when none has begun. Raises LakeError when the lake is another pipeline's."""
    try:
        record = reader.read_epoch(changelog_uri(pipeline.lake_root))
    except NoChangelogError:
        return None
    check_owner(pipeline, record)
    return record


def check_owner(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raises LakeError when the lake is another pipeline's."""
    if record.pipeline != pipeline.name:
        raise LakeError(
            f"the lake {pipeline.lake_root} belongs to the pipeline {record.pipeline!r}",
            f"give {pipeline.name!r} a lake root of its own",
        )


def has_tables(record: EpochRecord | None, records: Records) -> bool:
    """Whether any table of this epoch is in the lake; before that, the epoch can be begun again."""
    return record is not None and any(
        table.position_lsn is not None and table.position_lsn >= record.consistent_point - 1
        for table in records.values()
    )
