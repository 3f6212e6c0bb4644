"""lake/time_travel: a damaged table is not taken for a missing one, nor for one without a history."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from airflow_provider_pgrepl.errors import LakeError, LakeTableError
from airflow_provider_pgrepl.replication.lake.history.table import history_uri
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import HistoryAsOf
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Bases
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName

TABLE = TableName("public", "t")


def damage(uri: str) -> None:
    """Write a table whose only commit is incomplete."""
    write_deltalake(uri, pa.table({"id": [1]}))
    commit = Path(uri, "_delta_log", f"{0:020}.json")
    commit.write_bytes(commit.read_bytes()[:100])


def newest(root: Path, *known: str) -> None:
    points: Any = SimpleNamespace(at_or_before=lambda *_: SimpleNamespace(tables=dict.fromkeys(known, 0)))
    moment: Any = SimpleNamespace(lsn=LSN(1), epoch=Epoch(1))
    index: Any = None
    Bases(str(root), moment, points, index)._newest(TABLE)


def history(root: Path) -> None:
    HistoryAsOf.find(str(root), TABLE, pa.schema([]), Epoch(1), LSN(1))


def test_history_that_cannot_be_opened_is_not_called_missing(tmp_path: Path) -> None:
    damage(history_uri(str(tmp_path), TABLE))
    with pytest.raises(LakeError, match=r"the history of public\.t in .* cannot be opened") as caught:
        history(tmp_path)
    assert "resnapshot" not in caught.value.hint


def test_table_without_history_gets_the_setting_as_hint(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"public\.t keeps no history") as caught:
        history(tmp_path)
    assert caught.value.hint.startswith("set history: true")


def test_damaged_table_is_not_called_missing(tmp_path: Path) -> None:
    damage(f"{tmp_path}/{TABLE.path}")
    with pytest.raises(LakeTableError, match="cannot open the lake table"):
        newest(tmp_path)


def test_missing_folder_of_a_known_table_is_not_called_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(LakeTableError, match="there is no lake table at") as caught:
        newest(tmp_path, str(TABLE))
    assert "mounted" in caught.value.hint


def test_unknown_table_gets_the_names_of_the_lake(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"public\.t is not in the lake") as caught:
        newest(tmp_path, "public.T")
    assert caught.value.hint == "the lake holds: public.T; names are case-sensitive"
