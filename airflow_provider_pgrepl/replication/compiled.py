"""Loops that numba compiles, before anybody waits for them, and once on a host.

Compiling all of them takes some 20 seconds of a processor, and keeps every other thread of its process
waiting. So no process that serves compiles: the first call of a loop has other processes compile all, and
loads what those left on disk. A loop has one signature, so that all there is to compile is known beforehand.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types

from airflow_provider_pgrepl.replication.compiled_folder import folder

log = logging.getLogger(__name__)

_PACKAGE = __name__.rpartition(".")[0]
# One process each, which then have about half of the work.
_SHARES = (
    ("wire.kernels", "values.kernels"),
    ("lake.merging.kernels", "lake.merging.key_kernel", "lake.history.kernels"),
)
_LIMIT_S = 600.0

BYTES = types.Array(types.uint8, 1, "C", readonly=True)
INTS = types.Array(types.int64, 1, "C", readonly=True)
FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
HASHES = types.Array(types.uint64, 1, "C", readonly=True)
BYTES_OUT, INTS_OUT, FLAGS_OUT = types.uint8[::1], types.int64[::1], types.boolean[::1]
PAIRS_OUT = types.int64[:, ::1]
INT, FLAG = types.int64, types.boolean

inner: Any = numba.njit(nogil=True)
"""For a function that only loops call: compiled into each of them."""


class Loop:
    """A compiled function with one signature, which releases the GIL."""

    def __init__(self, function: Callable[..., Any], signature: tuple[Any, ...]) -> None:
        self.__doc__ = function.__doc__
        self._signature = signature
        self._loading = threading.Lock()
        self._is_loaded = False
        with _cached_in(folder()):
            self._dispatcher = numba.njit(nogil=True, cache=True)(function)

    def __call__(self, *arguments: Any) -> Any:
        if not self._is_loaded:
            ensure_compiled()
            self.load()
        return self._dispatcher(*arguments)

    def load(self) -> None:
        """Have the machine code at hand, from disk when it is there."""
        with self._loading:
            if not self._is_loaded:
                self._dispatcher.compile(self._signature)
                self._dispatcher.disable_compile()
                self._is_loaded = True


def loop(*signature: Any) -> Callable[[Callable[..., Any]], Loop]:
    """Make a function a Loop; `signature` holds the types of its arguments."""
    return lambda function: Loop(function, signature)


def ensure_compiled() -> None:
    """Return when the loops are on disk; have processes of their own compile them when they are not.

    If that fails each process compiles for itself what it calls.
    """
    marker = _marker()
    if marker.exists():
        return
    with _locked(folder() / "compiling"):
        if marker.exists():
            return
        log.info("compiling, first start on this host: some 20 seconds, once")
        began = time.monotonic()
        if _compile_in_processes():
            marker.touch()
            log.info("compiled in %.0f s", time.monotonic() - began)


def is_compiled() -> bool:
    """Whether the loops are on disk."""
    return _marker().exists()


def begin_compiling() -> None:
    """Have the loops compiled, if they have to be, while something else is waited for."""
    threading.Thread(target=ensure_compiled, name="pgrepl-compile", daemon=True).start()


def compile_modules(names: Sequence[str]) -> None:
    """Compile every loop of these modules (named below `replication`) in this process."""
    for name in names:
        for found in vars(importlib.import_module(f"{_PACKAGE}.{name}")).values():
            if isinstance(found, Loop):
                found.load()


def _compile_in_processes() -> bool:
    program = f"from {__name__} import compile_modules; import sys; compile_modules(sys.argv[1:])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, *share],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for share in _SHARES
    ]
    deadline = time.monotonic() + _LIMIT_S
    codes = [_wait(process, deadline) for process in running]
    if any(codes):
        log.warning("compiling in processes of its own failed (exit codes %s); it is done on demand", codes)
    return not any(codes)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _marker() -> Path:
    return folder() / f"complete-{_fingerprint()}"


def _fingerprint() -> str:
    """Changes with whatever numba compiles anew for: itself, Python, the processor, the sources."""
    found = hashlib.sha256(f"{numba.__version__} {sys.version} {binding.get_host_cpu_name()}".encode())
    found.update(binding.get_host_cpu_features().flatten().encode())
    for name in (name for share in _SHARES for name in share):
        room, _, module = f"{_PACKAGE}.{name}".rpartition(".")
        found.update(pkgutil.get_data(room, f"{module}.py") or b"")
    return found.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process of this host at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _cached_in(place: Path) -> Iterator[None]:
    """numba looks at its setting when a function is decorated; that of others stays as it is."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(place)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
