"""No file of the product is too long to be read at once."""

from __future__ import annotations

from pathlib import Path

MOST_LINES = 600
ROOT = Path(__file__).parents[2]


def test_no_file_of_the_product_exceeds_600_lines() -> None:
    folders = ("airflow_provider_pgrepl", "dags", "spark_apps", "demo", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 200
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in files}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
