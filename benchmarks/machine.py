"""The machine and the versions of a measurement, without names of hosts or paths."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

from demo.postgres import binaries

_LIBRARIES = ("pyspark", "deltalake", "pyarrow", "numba", "psycopg", "psycopg2-binary")


def describe() -> dict[str, str]:
    """Return hardware, operating system and versions, by heading."""
    postgres = subprocess.run(
        [str(binaries() / "postgres"), "--version"], check=True, capture_output=True, text=True
    )
    return {
        "CPU": f"{_cpu_model()}, {os.cpu_count()} cores",
        "RAM": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "OS": f"{_os_name()}, Linux {platform.release().split('-')[0]}",
        "PostgreSQL": postgres.stdout.split()[-1],
        "Python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.machine()


def _os_name() -> str:
    return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
