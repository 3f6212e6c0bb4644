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
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "NUMBA_CACHE_DIR"
"""Names another folder; numba's own variable."""

BESIDE = Path(__file__).parent / "__pycache__" / "compiled"
_NAME = "airflow_provider_pgrepl"
_PACKAGE = __name__.rpartition(".runtime.")[0]
# One process each, which then have about half of the work.
_SHARES = (
    ("pgoutput.kernels", "values.kernels"),
    ("lake.merge.kernels", "lake.merge.soft_deletes", "lake.history.kernels"),
)
_LIMIT_S = 600.0
# Types of arguments, as numba writes them.
BYTES = "Array(uint8, 1, 'C', readonly=True)"
INTS = "Array(int64, 1, 'C', readonly=True)"
FLAGS = "Array(boolean, 1, 'C', readonly=True)"
HASHES = "Array(uint64, 1, 'C', readonly=True)"
BYTES_OUT, INTS_OUT, FLAGS_OUT = "uint8[::1]", "int64[::1]", "boolean[::1]"
SHORTS_OUT = "int16[::1]"
PAIRS_OUT = "int64[:, ::1]"
INT, FLAG = "int64", "boolean"
_loading = threading.Lock()
_inner: set[Callable[..., Any]] = set()


@cache
def folder() -> Path:
    """The folder of this process; it exists and may be written.

    What an image or an administrator compiled beside a package that may not be written is copied from there:
    numba keeps to folders that it can write. Machine code is loaded from it: no other user may write there.
    """
    given = os.environ.get(FOLDER_VARIABLE, "").strip()
    if given:
        return _made(Path(given))
    if _is_writable(BESIDE):
        return BESIDE
    own = _user_cache()
    if own is not None and _is_private(own):
        if BESIDE.is_dir():
            shutil.copytree(BESIDE, own, dirs_exist_ok=True, copy_function=_copy_newer)
        return own
    passing = Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))
    log.warning(
        "no folder can keep what is compiled: each start compiles again. Set %s to one", FOLDER_VARIABLE
    )
    # For the processes that this one starts.
    os.environ[FOLDER_VARIABLE] = str(passing)
    return passing


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


def _user_cache() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME
    except RuntimeError:  # no home
        return None


def _is_writable(place: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=_made(place)):
            return True
    except OSError:
        return False


def _is_private(place: Path) -> bool:
    """Made for, and only written by, the user that we are."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    except OSError:
        return False
    is_ours = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and _is_writable(place)


def _copy_newer(source: str, target: str) -> str:
    if not Path(target).exists() or Path(target).stat().st_mtime < Path(source).stat().st_mtime:
        shutil.copy2(source, target)
    return target


def inner(function: Callable[..., Any]) -> Any:
    """Mark a function of a module that only loops of that module call: it is compiled into each of them."""
    _inner.add(function)
    return function


class Loop:
    """A compiled function with one signature, which releases the GIL.

    numba is imported when the first loop is called: most commands call none.
    """

    def __init__(self, function: Callable[..., Any], signature: tuple[str, ...]) -> None:
        self.__doc__ = function.__doc__
        self._function = function
        self._signature = f"({', '.join(signature)})"
        self._dispatcher: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self._dispatcher is None:
            ensure_compiled()
            self.load()
        return self._dispatcher(*arguments)

    def load(self) -> None:
        """Have the machine code at hand, from disk when it is there."""
        import numba

        with _loading:
            if self._dispatcher is not None:
                return
            names = self._function.__globals__
            for name, value in list(names.items()):
                if isinstance(value, FunctionType) and value in _inner:
                    names[name] = numba.njit(nogil=True)(value)
            with _cached_in(folder()):
                dispatcher = numba.njit(nogil=True, cache=True)(self._function)
            dispatcher.compile(self._signature)
            dispatcher.disable_compile()
            self._dispatcher = dispatcher


def loop(*signature: str) -> Callable[[Callable[..., Any]], Loop]:
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
    import numba
    from llvmlite import binding  # type: ignore[import-untyped]

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
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(place)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
