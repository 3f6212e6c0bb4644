"""changelog/own_tables.py: a lake inside another would be dropped with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.own_tables import check_holds_no_lake, check_not_nested


def make_lake(root: Path) -> Path:
    """Make the folders of a lake: those of its changelog and of a table."""
    for table in ("_pgrepl/changelog", "public/t"):
        (root / table / "_delta_log").mkdir(parents=True)
    return root


@pytest.mark.parametrize("inner", ["public", "sub", "_pgrepl", "public/t", "a/b/c", "_pgrepl/changelog"])
def test_root_inside_a_lake_is_refused(tmp_path: Path, inner: str) -> None:
    lake = make_lake(tmp_path / "lake")
    with pytest.raises(LakeError, match=rf"inside another one: {lake} has a changelog"):
        check_not_nested(str(lake / inner))


def test_root_that_a_link_leads_into_a_lake_is_refused(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake")
    (tmp_path / "link").symlink_to(lake / "public")
    with pytest.raises(LakeError, match="inside another one"):
        check_not_nested(str(tmp_path / "link"))


@pytest.mark.parametrize("inner", ["inner", "a/inner", "_pgrepl/inner", "public/t/inner"])
def test_root_around_a_lake_is_refused_and_not_dropped(tmp_path: Path, inner: str) -> None:
    outer = make_lake(tmp_path / "outer")
    make_lake(outer / inner)
    for check in (check_not_nested, check_holds_no_lake):
        with pytest.raises(LakeError, match=rf"inside the lake {outer}: {outer / inner} has a changelog"):
            check(str(outer))


def test_lakes_next_to_each_other_are_fine(tmp_path: Path) -> None:
    lake = make_lake(tmp_path / "lake")
    make_lake(tmp_path / "lake2")
    check_not_nested(str(lake))
    check_not_nested(str(tmp_path / "lake3"))


def test_linked_lake_inside_is_not_taken_for_a_part(tmp_path: Path) -> None:
    """No file is deleted through a link."""
    lake, other = make_lake(tmp_path / "lake"), make_lake(tmp_path / "other")
    (lake / "link").symlink_to(other)
    check_holds_no_lake(str(lake))
