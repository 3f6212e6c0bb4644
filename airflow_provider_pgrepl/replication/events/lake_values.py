"""LakeValues: large values that no change tells, as the lake's tables had them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeUnavailableError, PgReplError
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.filled_rows import Key, Values
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.time_travel.moment import find_moment
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Planner
from airflow_provider_pgrepl.replication.lake.time_travel.rows_by_key import RowsByKey
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import typed_column
from airflow_provider_pgrepl.replication.values.text_output import texts_of
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)


class LakeValues:
    """Looks values up in a pipeline's lake, as of a moment. What the lake cannot tell as it was sent, it does
    not tell at all."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: tuple[object, _Table | None] = (None, None)

    def find(
        self, record: RelationRecord, epoch: Epoch, lsn: LSN, wanted: Mapping[Key, Collection[int]]
    ) -> dict[Key, Values]:
        """Of the rows under some keys of the replica identity, as of an LSN, the values at places in the
        stream. Raises LakeUnavailableError."""
        places = sorted(set().union(*wanted.values()))
        moment = record.version, epoch, lsn, tuple(places)
        failed = ""
        try:
            if self._known[0] != moment:
                self._known = moment, self._table(record, epoch, lsn, places)
            table = self._known[1]
            return {} if table is None else table.find(wanted)
        except LakeUnavailableError:
            raise
        except PgReplError as error:
            failed = error.message
        except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones, which may hold values
            failed = trace_of(error)
        log.warning("values of %s as of %s cannot be looked up: %s", record.name, lsn, failed)
        return {}

    def _table(
        self, record: RelationRecord, epoch: Epoch, lsn: LSN, places: Collection[int]
    ) -> _Table | None:
        points = Points(self._pipeline.lake_root)
        moment = find_moment(self._pipeline.lake_root, points, lsn, epoch=epoch)
        plan = Planner(self._pipeline, moment, points).plan(record.name)
        relation = plan.relation
        if relation is None or relation.oid != record.message.oid or plan.unverified is not None:
            return None
        columns = _columns(record, relation)
        identity = [place for place, one in enumerate(record.message.columns) if one.is_identity]
        keys = {place: columns[place] for place in identity if place in columns}
        if [one.name for one in keys.values()] != [one.name for one in relation.key_columns] or not keys:
            return None
        values = {
            place: columns[place]
            for place in places
            if place not in record.hidden and place in columns and self._is_exact(columns[place], relation)
        }
        names = [one.name for one in keys.values()], [one.name for one in values.values()]
        rows = RowsByKey(plan, *names)
        if not values or not rows.can_be_read:
            return None
        return _Table(rows, self._pipeline.choices(relation.table), relation, keys, values)

    def _is_exact(self, column: Column, relation: Relation) -> bool:
        """Whether the lake's value can be written as the server did (see texts_of)."""
        choices = self._pipeline.choices(relation.table)
        choice = choices.column(column.name)
        if choice.excluded or column.attnum in relation.ignored:
            return False
        kind = typed_column(column, relation.table, choices).lake_type
        is_plain = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind)
        return is_plain or (choice.infinity == "error" and "decimal" not in str(kind))


@dataclass(frozen=True)
class _Table:
    """`keys` and `values`: columns by place in the stream."""

    rows: RowsByKey
    choices: TableChoices
    relation: Relation
    keys: Mapping[int, Column]
    values: Mapping[int, Column]

    def find(self, wanted: Mapping[Key, Collection[int]]) -> dict[Key, Values]:
        names, texts = [one.name for one in self.keys.values()], zip(*wanted, strict=True)
        parsers = (typed_column(one, self.relation.table, self.choices) for one in self.keys.values())
        typed = [parser.parse(pa.array(some, TEXT)) for parser, some in zip(parsers, texts, strict=True)]
        keys = pa.table(typed, names=names)
        rows = self.rows.find(keys)
        found: dict[Key, Values] = {}
        columns = {
            place: texts_of(rows[column.name].combine_chunks(), column.pg_type).to_pylist()
            for place, column in self.values.items()
        }
        of = list(wanted)
        for row, number in enumerate(match_rows(rows, keys).tolist()):
            values = {place: texts[row] for place, texts in columns.items()}
            key = of[number]
            found[key] = {
                place: text for place, text in values.items() if place in wanted[key] and text is not None
            }
        return found


def _columns(record: RelationRecord, relation: Relation) -> dict[int, Column]:
    """The relation's columns by place in the stream, as far as both are the same."""
    known = {(one.name, one.type_oid, one.typmod): one for one in relation.columns}
    sent = enumerate(record.message.columns)
    found = ((place, known.get((one.name, one.type_oid, one.typmod))) for place, one in sent)
    return {place: column for place, column in found if column is not None}
