"""What stands in a lake before an epoch begins there: of which lake it is, and of which epochs.

Without a changelog nothing else says so. App ids of tables carry the pipeline's name, and a pipeline of
another server may have that, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, EpochRecord
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.lake.consistent_points import Points, points_uri
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_former, read_apps
from airflow_provider_pgrepl.replication.lake.history.place import history_path
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.storage.durable import is_same_place


@dataclass(frozen=True)
class Beginning:
    """The number of a new epoch. `former_lake`: the id of the lake whose changelog was lost, as the state has
    it; empty if it has none, or the changelog is there."""

    epoch: Epoch
    former_lake: str = ""


def find_beginning(
    store: Store, pipeline: Pipeline, tables: Iterable[TableName], last: EpochRecord | None
) -> Beginning:
    """Return with what an epoch begins after `last`, or without a changelog.

    Its number is above all that points, index of relations and, without a changelog, the tables are of: what
    they say of an epoch would be believed of the new one. Raises LakeError for what is in the place of a
    table, or of the points, and was not written into this lake by what the state knows.
    """
    lake_root = pipeline.lake_root
    former, of_tables = ("", 0) if last is not None else _check_former_tables(store, pipeline, tables)
    if last is None:
        _check_former_points(lake_root, former)
    epochs = [point.epoch for point in Points(lake_root).all()]
    of_index = RelationIndex(relations_uri(lake_root)).last_epoch()
    highest = max(0 if last is None else last.epoch, of_tables, of_index, *epochs)
    return Beginning(Epoch(highest + 1), former)


def _check_former_tables(store: Store, pipeline: Pipeline, tables: Iterable[TableName]) -> tuple[str, int]:
    """The id of the lost lake, and the highest epoch that a table is of."""
    name, root = pipeline.name, pipeline.lake_root
    recorded = store.read_pipeline(name)
    is_here = recorded is not None and is_same_place(recorded.lake, root)
    former = recorded.lake_id if recorded is not None and is_here else ""
    records = store.read_tables(name) if is_here else {}
    copied = {table for table, record in records.items() if record.position_lsn is not None}
    epochs = [
        check_former(f"{root}/{path}", name, former, is_copied=table in copied)
        for table in tables
        for path in (table.path, history_path(table))
    ]
    return former, max(epochs, default=0)


def _check_former_points(lake_root: str, former: str) -> None:
    uri = points_uri(lake_root)
    lakes = {app for app in read_apps(uri) if app.startswith(LAKE_APP)}
    if lakes and f"{LAKE_APP}{former}" not in lakes:
        raise LakeError(
            f"the consistent points in {uri} are of another lake, and there is no changelog that says which."
            " Nothing was changed",
            "bring the folder _pgrepl/changelog of that lake back; if it is lost, move the points away",
        )
