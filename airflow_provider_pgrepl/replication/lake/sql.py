"""Read-only SQL, run by DataFusion, over the lake's tables as of one point in time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.errors import ConfigError, LakeError, PgReplError
from airflow_provider_pgrepl.replication.delta.table import append_delta, open_delta
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.storage.errors import is_storage_error, storage_error
from airflow_provider_pgrepl.trace import log_unexpected, traced

log = logging.getLogger(__name__)

_PLAIN_TYPES = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_READING = ("select", "with", "values", "describe")
_BEFORE_FIRST_WORD = re.compile(r"(\s|\(|--[^\n]*(\n|$)|/\*.*?\*/)*", re.DOTALL)
_WORD = re.compile(r"\w*")

Source = Callable[[str], DeltaTable | pa.Table]
"""Returns the rows of a table as of that point in time. The argument is its name, as in `public.orders`."""


@contextmanager
def sql_reader(
    sql: str, tables: Sequence[str], source: Source, moment: str
) -> Iterator[pa.RecordBatchReader]:
    """Run one statement in DataFusion's SQL over `tables`, and yield a reader that reads its rows on demand.

    Tables are named as in PostgreSQL: `sales.items`, `orders` or `public.orders`, in double quotes if the
    name has capitals. Only tables whose name is in the statement are opened. `moment` names the point in time
    in error messages.

    Raises ConfigError for a statement that is not a query or cannot be planned, LakeError if it fails while
    rows are read.
    """
    check_reads(sql)
    hint = f"tables of the lake: {', '.join(tables) or 'no table'}"
    with ExitStack() as stack:
        builder = QueryBuilder()
        schemas = {"public"}
        for name in _named(sql, tables):
            if name.schema not in schemas:
                schemas.add(name.schema)
                builder.execute(f"create schema {quote_identifier(name.schema)}").read_all()
            rows = source(str(name))
            if isinstance(rows, pa.Table):
                uri = stack.enter_context(TemporaryDirectory(prefix="pgrepl-sql-"))
                append_delta(uri, rows)
                rows = open_delta(uri)
            builder.register(name.sql, rows)
        yield _reader(builder, sql, f"the query at {moment} failed", hint)


def check_reads(sql: str) -> None:
    """Raise ConfigError unless the statement begins like a query: DataFusion's `copy` would write files."""
    first = _WORD.match(sql, _BEFORE_FIRST_WORD.match(sql).end()).group().lower()  # type: ignore[union-attr]
    if first not in _READING:
        raise ConfigError(
            f"the statement begins with {first or 'no word'}, which is no query",
            f"give one that begins with {', '.join(_READING[:-1])} or {_READING[-1]}",
        )


def _named(sql: str, tables: Sequence[str]) -> list[TableName]:
    """Return the tables whose name, without the schema, occurs as a word anywhere in the statement."""
    text = sql.casefold()
    return [table for table in map(TableName.parse, tables) if _is_word_of(text, table.name)]


def _is_word_of(text: str, name: str) -> bool:
    word = re.escape(quote_identifier(name)[1:-1].casefold())
    return re.search(rf"(?<![\w$]){word}(?![\w$])", text) is not None


def _reader(builder: QueryBuilder, sql: str, doing: str, hint: str) -> pa.RecordBatchReader:
    failed: PgReplError | None = None
    try:
        found = pa.RecordBatchReader.from_stream(builder.execute(sql))
    except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones
        # Before any row is read, DataFusion's message is about the statement only, so it holds no row values.
        said = str(error).partition("\n")[0]
        wrong = (
            storage_error(doing, error) if is_storage_error(error) else ConfigError(f"{doing}: {said}", hint)
        )
        failed = traced(wrong, error)
    if failed is not None:
        raise failed
    fields = [field.with_type(_PLAIN_TYPES.get(field.type, field.type)) for field in found.schema]
    schema = pa.schema(fields, metadata=found.schema.metadata)
    return pa.RecordBatchReader.from_batches(schema, _batches(found, schema, doing, hint))


def _batches(
    found: pa.RecordBatchReader, schema: pa.Schema, doing: str, hint: str
) -> Iterator[pa.RecordBatch]:
    """Yield the batches with view types cast to plain ones, which all readers support.

    Raises LakeError without DataFusion's message, which may hold values of rows, and LakeUnavailableError.
    """
    failed: PgReplError | None = None
    try:
        for batch in found:
            yield batch.cast(schema)
    except Exception as error:  # noqa: BLE001
        log_unexpected(log, doing, error)
        wrong = LakeError(f"{doing}: {type(error).__name__}", hint)
        failed = traced(storage_error(doing, error) if is_storage_error(error) else wrong, error)
    if failed is not None:
        raise failed
