"""Unpack PostgreSQL from the jars of Zonky: unpack_majors.py JARS TARGET makes TARGET/14.24/bin and so on."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(jar: Path, target: Path) -> None:
    """Unpack the one archive of a jar. A folder of the version is complete as soon as it exists."""
    version = re.fullmatch(r".*-(\d+\.\d+)\.\d+\.jar", jar.name)
    if version is None:
        raise SystemExit(f"{jar.name}: no version in the name")
    folder = target / version[1]
    if folder.exists():
        return
    unpacking = target / f"{version[1]}.unpacking"
    with zipfile.ZipFile(jar) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".txz"))
        with outer.open(name) as packed, tarfile.open(fileobj=packed, mode="r:xz") as archive:
            # Python before 3.11.4, as in Debian 12, has no filters.
            archive.extraction_filter = getattr(tarfile, "tar_filter", None)
            archive.extractall(unpacking)  # noqa: S202 - Maven has checked its digest
    unpacking.rename(folder)


if __name__ == "__main__":
    jars, target = map(Path, sys.argv[1:])
    for jar in sorted(jars.glob("*.jar")):
        unpack(jar, target)
