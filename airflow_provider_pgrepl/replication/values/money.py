"""money."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.parser import Parser, not_output_of_type
from airflow_provider_pgrepl.replication.values.scalars import Decimal

# What lc_monetary C gives, with a currency and marks that mean nothing: the source knows no currency.
_AMOUNT = r"^-?\$\d{1,3}(?:,\d{3})*\.\d\d$"
_PRECISION, _SCALE = 19, 2


@dataclass(frozen=True)
class Money:
    """money as hundredths, which is what lc_monetary C takes its 64 bits for.

    A source that wrote them under a locale with another number of digits, as ja_JP with none, means others.
    """

    amount: Decimal

    @property
    def lake_type(self) -> pa.DataType:
        return self.amount.lake_type

    @property
    def csv_type(self) -> pa.DataType | None:
        return None

    def parse(self, texts: pa.Array) -> pa.Array:
        if pc.all(pc.match_substring_regex(texts, _AMOUNT)).as_py() is False:
            raise not_output_of_type()
        digits = pc.replace_substring(pc.replace_substring(texts, "$", ""), ",", "")
        return self.amount.parse(digits)


def money(_: PgType, choice: ColumnChoice) -> Parser:
    """decimal(19,2) holds all of it; another decimal by the pipeline's choice."""
    chosen = choice.lake_type
    if chosen is not None and chosen.name == "decimal":
        return Money(Decimal(chosen.precision, chosen.scale, odd_is_null=False, is_declared=False))
    return Money(Decimal(_PRECISION, _SCALE, odd_is_null=False))
