"""What is to be said of tables that can be replicated, because it may not be what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from airflow_provider_pgrepl.replication.postgres.names import show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def table_warnings(relations: Iterable[Relation], pipeline: Pipeline) -> Iterator[str]:
    """Sentences about tables as their publication publishes them."""
    for relation in relations:
        yield from _unpublished_columns(relation, pipeline)
        if relation.replica_identity == "n" or (
            relation.replica_identity != "f" and not relation.key_columns
        ):
            yield (
                f"{relation.table}: has no replica identity, so PostgreSQL refuses UPDATE and DELETE on it as"
                " long as it is published"
            )


def _unpublished_columns(relation: Relation, pipeline: Pipeline) -> Iterator[str]:
    choices = pipeline.choices(relation.table)
    names = [
        show_identifier(column.name)
        for column in relation.unpublished
        if not choices.column(column.name).excluded
    ]
    if names:
        columns = "generated column" if len(names) == 1 else "generated columns"
        yield (
            f"{relation.table}: {columns} {', '.join(names)} {'is' if len(names) == 1 else 'are'} null in the"
            " lake, because the publication does not hold it: PostgreSQL can publish stored ones from 18 on"
            " (publish_generated_columns = stored), virtual ones never. exclude_columns leaves a column out"
        )
