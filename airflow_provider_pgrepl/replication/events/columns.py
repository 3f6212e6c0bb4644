"""A table's columns as a target gets them: under which names, and which only hashed, masked or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import DriftError, one_line
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.matching import HiddenColumns, new_places
from airflow_provider_pgrepl.replication.events.relations import KnownRelations
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.publisher_columns import ColumnRules
from airflow_provider_pgrepl.replication.settings.row_filter import RowFilter
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice, TableChoices
from airflow_provider_pgrepl.replication.values import TypedColumn, typed_column
from airflow_provider_pgrepl.replication.values.text import Text, as_string

Hide = Callable[[pa.Array], pa.Array]
"""Makes other texts of a column's; NULL stays NULL."""
Attnums = Mapping[int, Collection[int]]
_TEXT, _TEXT_NAME = 25, "text"
_MASK = "***"


class HiddenText(Text):
    """What is shown of values that are hidden: a text, whatever they are."""

    csv_type = None

    def __init__(self, hide: Hide) -> None:
        self._hide = hide

    def parse(self, texts: pa.Array) -> pa.Array:
        return as_string(self._hide(texts))


@dataclass(frozen=True)
class PublishedColumn:
    """`source`: as the table has it. `name`: what the target calls it. `hide`: what becomes of its texts."""

    source: Column
    name: str
    hide: Hide | None = None

    @property
    def is_key(self) -> bool:
        return self.source.is_key

    @cached_property
    def column(self) -> Column:
        """As the target has it: a text where its values are hidden."""
        if self.hide is None:
            return replace(self.source, name=self.name)
        return replace(
            self.source,
            name=self.name,
            type_oid=_TEXT,
            typmod=-1,
            type_name=_TEXT_NAME,
            type_kind="b",
            type=None,
            missing=None,
        )

    def choice(self, choices: TableChoices) -> ColumnChoice:
        """How its values look, which the pipeline says of the name that it has in the table."""
        if self.hide is not None:
            return ColumnChoice()
        return choices.column(self.source.name, is_key=self.is_key)

    def typed(self, table: TableName, choices: TableChoices, index: int | None = None) -> TypedColumn:
        """Raises ConfigError for a type that does not fit."""
        if self.hide is not None:
            return TypedColumn(self.column, table, index, HiddenText(self.hide))
        return replace(typed_column(self.source, table, choices, index), column=self.column)


@dataclass(frozen=True)
class PublishedColumns:
    """What the rules of a publisher make of each table's columns. `salt`: of the hashes; `filter`: of which
    of its rows the target is told. `begun_with`: the attnums, by the oid of their table, that the publisher
    began with. Another column is published only if a rule names it; None: every column is.

    A column is known by its place in the catalog once it had a name that a rule says, so that it stays hidden
    when it, or its table, is renamed. Methods raise DriftError, which stops the table alone, where a rule
    names a column that the table never had, hides its key, or gives two columns one name.
    """

    relations: KnownRelations
    rules: ColumnRules = field(default_factory=ColumnRules)
    salt: bytes = b""
    filter: RowFilter = field(default_factory=RowFilter)
    begun_with: Attnums | None = None

    def of_stream(self, record: RelationRecord, columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
        """Of a relation's columns, by place in the stream, those that are published."""
        oid, new = record.message.oid, set[int]()
        self._check_kin(oid, record.name)
        if self.begun_with is not None:
            new = new_places(record, self.relations.records(oid), self.begun_with.get(oid, ()))
        if not self._rules_of(oid, record.names):
            _refuse_new(record.name, columns, new)
            return _as_they_are(columns)
        whole = record.message.replica_identity == "f"
        sent = record.message.columns
        keys = [i for i, one in columns.items() if (one.is_key if whole else sent[i].is_identity)]
        return self._published(record.name, columns, keys, new, lambda known: known.places(record))

    def of_catalog(self, relation: Relation, columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
        """Of a relation's columns, by attnum, those that are published."""
        new = set[int]()
        self._check_kin(relation.oid, relation.table)
        if self.begun_with is not None:
            new = columns.keys() - self.begun_with.get(relation.oid, ())
        if not self._rules_of(relation.oid, {relation.table}):
            _refuse_new(relation.table, columns, new)
            return _as_they_are(columns)
        keys = [attnum for attnum, one in columns.items() if one.is_key]
        return self._published(relation.table, columns, keys, new, lambda known: known.attnums(relation))

    def _check_kin(self, oid: int, table: TableName) -> None:
        """Raises DriftError for a table without rules whose partitioned table, or partition, has some."""
        ruled = {*self.rules.tables(), *self.filter.tables}
        if not ruled or ruled & {table, *self.relations.names(oid)}:
            return
        if kin := sorted(ruled & self.relations.kin(oid)):
            raise kin_error(table, kin[0])

    def _known(self, *names: ColumnName) -> HiddenColumns:
        return HiddenColumns(frozenset(names), self.relations.records)

    def _rules_of(self, oid: int, names: Collection[TableName]) -> bool:
        """Whether any rule is of the table, under whichever name it had."""
        tables = self.rules.tables() & {*names, *self.relations.names(oid)}
        said = {column for column in self.rules.all if column.table in tables}
        if said and (unknown := sorted(said - self.relations.columns(oid))):
            raise DriftError(
                f"{unknown[0]}, which the publisher's settings name, was never a column of the table",
                "mend the name; a rule for a column that comes later is written when it has come, while the"
                " publisher stands",
                remedy=None,
            )
        return bool(said)

    def _published(
        self,
        table: TableName,
        columns: Mapping[int, Column],
        keys: Collection[int],
        new: Set[int],
        places_of: Callable[[HiddenColumns], Collection[int]],
    ) -> dict[int, PublishedColumn]:
        """`places_of`: where columns that are known by some names are, or may be: more are hidden then."""
        rules = (self.rules.excluded, self.rules.masked, self.rules.hashed)
        excluded, masked, hashed = (places_of(self._known(*names)) for names in rules)
        renamed = self._renamed(table, columns, places_of)
        _refuse_new(table, columns, new - {*excluded, *masked, *hashed, *renamed})
        if lost := sorted(columns[place].name for place in keys if place in excluded or place in masked):
            raise DriftError(
                f"{', '.join(map(one_line, lost))} of {table} {'is' if len(lost) == 1 else 'are'} of its key,"
                " by which consumers tell rows apart",
                "columns of a key can be hashed (hash_columns), not masked or excluded",
                remedy=None,
            )
        found = {}
        for place, column in columns.items():
            if place in excluded:
                continue
            hide = _masked if place in masked else partial(_hashed, self.salt) if place in hashed else None
            found[place] = PublishedColumn(column, renamed.get(place, column.name), hide)
        names = [one.name for one in found.values()]
        if alike := sorted({name for name in names if names.count(name) > 1}):
            raise DriftError(
                f"two columns of {table} are called {', '.join(map(one_line, alike))} at the target",
                "give another name in rename_columns",
                remedy=None,
            )
        return found

    def _renamed(
        self,
        table: TableName,
        columns: Mapping[int, Column],
        places_of: Callable[[HiddenColumns], Collection[int]],
    ) -> dict[int, str]:
        """New names by place. Where it cannot be told which column is meant, that of the very name is."""
        found: dict[int, str] = {}
        for known, name in self.rules.renamed.items():
            places = places_of(self._known(known))
            if len(places) > 1:
                places = [at for at, one in columns.items() if ColumnName(table, one.name) == known]
            found |= dict.fromkeys(places, name)
        return found


def kin_error(table: TableName, ruled: TableName) -> DriftError:
    """For a table that settings do not name, though they name its partitioned table or its partition."""
    return DriftError(
        f"{table} and {ruled} were, or are, partition and partitioned table, and the publisher has settings"
        f" for {ruled} alone",
        f"say of {table} too what becomes of its columns and rows: rename_columns with a column's own name"
        " says that it is published",
        remedy=None,
    )


def _refuse_new(table: TableName, columns: Mapping[int, Column], new: Set[int]) -> None:
    """Raises DriftError where new columns are published that no rule names."""
    if names := ", ".join(sorted(one_line(column.name) for place, column in columns.items() if place in new)):
        raise DriftError(
            f"{table} has columns that it did not have when the publisher began, and that no rule names"
            f" (new_columns): {names}",
            "name each in exclude_columns, hash_columns or mask_columns; or, to publish it as it is, in"
            " rename_columns with its own name",
            remedy=None,
        )


def _as_they_are(columns: Mapping[int, Column]) -> dict[int, PublishedColumn]:
    return {place: PublishedColumn(column, column.name) for place, column in columns.items()}


def _masked(texts: pa.Array) -> pa.Array:
    mask, null = (pa.scalar(text, pa.large_string()) for text in (_MASK, None))
    return pc.if_else(texts.is_valid(), mask, null)


def _hashed(salt: bytes, texts: pa.Array) -> pa.Array:
    """SHA-256 over the salt and the text, in hexadecimal digits."""
    begun = hashlib.sha256(salt)

    def digests() -> Iterator[str | None]:
        for text in texts.cast(pa.large_binary()).to_pylist():
            if text is None:
                yield None
                continue
            one = begun.copy()
            one.update(text)
            yield one.hexdigest()

    return pa.array(digests(), pa.large_string())
