"""A state database that knows nothing of a pipeline which has begun: found before anything acts on it."""

from __future__ import annotations

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import StateError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store


def check_state(store: Store, pipeline: Pipeline, epoch: EpochRecord | None) -> None:
    """Raises StateError when the lake has begun and nothing is recorded of the pipeline. Creates nothing."""
    if epoch is not None and not is_recorded(store, pipeline):
        raise lost_state(pipeline, epoch)


def is_recorded(store: Store, pipeline: Pipeline) -> bool:
    """Raises StateError when the state cannot be read."""
    return store.is_set_up() and store.read_pipeline(pipeline.name) is not None


def lost_state(pipeline: Pipeline, epoch: EpochRecord) -> StateError:
    """What happened, and what leads out of it."""
    return StateError(
        f"the lake of pipeline {pipeline.name} is in epoch {epoch.epoch}, but the state database knows"
        " nothing of the pipeline: its schema _pgrepl was dropped, or this is another server or database, or"
        " a copy of the source",
        "name the database that has it (state_conn_id, or PGREPL_STATE_DSN), or bring it back from a backup."
        f" If it is lost: {hints.reference('errors')}. Nothing was changed",
    )
