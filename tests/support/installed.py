"""A virtual environment with this package and one of its extras, without network."""

from __future__ import annotations

import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

_OURS = "airflow-provider-pgrepl"


def environment(folder: Path, extra: str) -> Path:
    """Create a virtual environment, and return its Python.

    It has links to what `pip install 'airflow-provider-pgrepl[EXTRA]'` would install there: the packages of
    the tests' environment that the declared requirements lead to, and no other one.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in _required(extra):
        for entry in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            (site / entry).symlink_to(Path(str(found.locate_file(entry))))
    return folder / "bin" / "python"


def _required(extra: str) -> Iterator[Distribution]:
    waiting, seen = [Requirement(f"{_OURS}[{extra}]")], set[tuple[str, str]]()
    yielded = set[str]()
    while waiting:
        wanted = waiting.pop()
        found = distribution(wanted.name)
        if found.name not in yielded:
            yielded.add(found.name)
            yield found
        for of_extra in ("", *wanted.extras):
            if (found.name, of_extra) in seen:
                continue
            seen.add((found.name, of_extra))
            for text in found.requires or ():
                required = Requirement(text)
                if required.marker is None or required.marker.evaluate({"extra": of_extra}):
                    waiting.append(required)
