"""The tables of settings in docs/reference, made from the settings: `python -m tests.support.settings_page`.

The text around the markers of a page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.mistakes import Fields
from airflow_provider_pgrepl.replication.settings.pipeline import PIPELINE_FIELDS
from airflow_provider_pgrepl.replication.settings.publisher_sections import PUBLISHER_FIELDS
from airflow_provider_pgrepl.replication.settings.schema import descriptions

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGES = {_FOLDER / "pipeline.md": PIPELINE_FIELDS, _FOLDER / "publishers.md": PUBLISHER_FIELDS}
_BEGIN = "<!-- settings: python -m tests.support.settings_page -->"
_END = "<!-- end of settings -->"


def text(page: Path) -> str:
    """Return the page with the tables of its settings."""
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{page} lacks its markers"
    return "\n".join([before + _BEGIN, *_tables(PAGES[page]), _END + after])


def _tables(fields: Fields) -> Iterator[str]:
    told = descriptions(fields)
    for section in fields.sections:
        title = (section.__doc__ or "").strip().splitlines()[0].rstrip(".")
        yield f"\n{title}:\n\n| field | default | meaning |\n|---|---|---|"
        for name in section.__annotations__:
            default = f"`{json.dumps(fields.defaults[name])}`" if name in fields.defaults else "–"
            meaning = re.sub(r"(?<!\\)\|", r"\\|", told[name]).rstrip(".")
            yield f"| `{name}` | {default} | {meaning} |"
    yield ""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(text(page), encoding="utf-8")
