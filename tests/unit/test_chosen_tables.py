"""app/operations/selection.py: the hint for names that are not a pipeline's tables."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.app.operations.selection import _known_tables


def test_hint_lists_similar_names_and_twenty_tables_at_most() -> None:
    known = [f"public.t{number:04}" for number in range(2000)]
    hint = _known_tables(["sales.orders", "public.t19999"], known)
    assert hint.startswith("did you mean public.t1999? its tables: public.t0000, ")
    assert hint.endswith("public.t0019 and 1980 more, which pgrepl status FILE.json lists")
    assert len(hint) < 500
