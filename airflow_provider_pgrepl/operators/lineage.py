"""The lineage of tasks for Airflow's OpenLineage provider, which calls these methods if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, read_pipeline
from airflow_provider_pgrepl.hooks.replication import access_to
from airflow_provider_pgrepl.replication.postgres.names import TableName

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage

    from airflow_provider_pgrepl.replication.app.lineage import LineageDataset, TableLineage


class OpenLineageOperator:
    """The part of an operator that reports source tables as inputs and lake tables as outputs.

    https://airflow.apache.org/docs/apache-airflow-providers-openlineage/stable/guides/developer.html
    """

    pipeline: PipelineArgument

    def lineage_tables(self) -> Sequence[TableName]:
        """Return the tables that the task copies or replicates; empty: all of the pipeline."""
        return ()

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        """Return the tables that were recorded before the task: none before the first snapshot."""
        return self._lineage()

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage:  # noqa: ARG002
        """Return the tables that are recorded now. The provider also calls this after a failure."""
        return self._lineage()

    def _lineage(self) -> OperatorLineage:
        # Import these here: the provider is optional, and parsing a DAG needs none of them.
        from airflow.providers.openlineage.extractors import OperatorLineage

        from airflow_provider_pgrepl.replication.app.lineage import read_lineage

        tables = read_lineage(access_to(read_pipeline(self.pipeline)), self.lineage_tables())
        # Without lake tables, all tables have one output.
        outputs = {(one.namespace, one.name): (one, table) for table in tables for one in table.lake}
        return OperatorLineage(
            inputs=[_dataset(table.source) for table in tables],
            outputs=[_dataset(one, table) for one, table in outputs.values()],
        )


def _dataset(one: LineageDataset, origin: TableLineage | None = None) -> Any:
    """Return a dataset of OpenLineage. `origin`: the table that the lake table comes from."""
    from openlineage.client.event_v2 import Dataset
    from openlineage.client.facet_v2 import column_lineage_dataset, schema_dataset, storage_dataset

    facets: dict[str, Any] = {}
    if one.columns:
        fields = [schema_dataset.SchemaDatasetFacetFields(column.name, column.type) for column in one.columns]
        facets["schema"] = schema_dataset.SchemaDatasetFacet(fields=fields)
    if one.is_delta:
        facets["storage"] = storage_dataset.StorageDatasetFacet(storageLayer="delta", fileFormat="parquet")
    if origin is not None and one.columns:
        identity = column_lineage_dataset.Transformation(type="DIRECT", subtype="IDENTITY")
        source = origin.source
        facets["columnLineage"] = column_lineage_dataset.ColumnLineageDatasetFacet(
            fields={
                column.name: column_lineage_dataset.Fields(
                    [
                        column_lineage_dataset.InputField(
                            source.namespace, source.name, column.source_column, [identity]
                        )
                    ]
                )
                for column in one.columns
                if column.source_column is not None
            }
        )
    return Dataset(namespace=one.namespace, name=one.name, facets=facets)
