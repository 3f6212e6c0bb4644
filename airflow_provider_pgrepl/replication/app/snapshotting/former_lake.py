"""Tables in a lake without a changelog: of which lake they are, before an epoch begins over them.

Their app ids carry the pipeline's name, and a pipeline of another server may have that, too.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_former
from airflow_provider_pgrepl.replication.lake.history.place import history_path
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.storage.durable import is_same_place


def check_former_tables(store: Store, pipeline: Pipeline, tables: Iterable[TableName]) -> str:
    """Check that what is in the place of these tables is this pipeline's, where no changelog says so.

    Returns the id of the lake whose changelog was lost, as the state has it; empty if it has none. Raises
    LakeError for a table of a pipeline of this name that the state did not copy into this lake.
    """
    name, root = pipeline.name, pipeline.lake_root
    recorded = store.read_pipeline(name)
    is_here = recorded is not None and is_same_place(recorded.lake, root)
    former = recorded.lake_id if recorded is not None and is_here else ""
    records = store.read_tables(name) if is_here else {}
    copied = {table for table, record in records.items() if record.position_lsn is not None}
    for table in tables:
        for path in (table.path, history_path(table)):
            check_former(f"{root}/{path}", name, former, is_copied=table in copied)
    return former
