"""Functions that numba compiles ahead of time, once for each host.

Compiling all of them takes about 20 s of CPU time, and blocks every other thread of the process. Therefore a
working process does not compile: the first call of a function starts other processes that compile all of
them, and loads the result from disk. Each function has one signature, so that everything to compile is known
in advance.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import logging
import os
import pkgutil
import shutil
import signal
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
"""The environment variable with the folder of compiled functions; numba's own variable."""

BESIDE = Path(__file__).parent / "__pycache__" / "compiled"
_NAME = "airflow_provider_pgrepl"
_PACKAGE = __name__.rpartition(".runtime.")[0]
# The modules that each of the compiling processes compiles, about half of the work each.
_SHARES = (
    ("pgoutput.kernels", "values.kernels"),
    (
        "lake.merge.kernels",
        "lake.merge.soft_deletes",
        "lake.history.kernels",
        "lake.verify.kernels",
        "lake.verify.text_kernels",
    ),
)
_LIMIT_S = 600.0
_PR_SET_PDEATHSIG = 1
# Types of arguments, as numba writes them.
BYTES = "Array(uint8, 1, 'C', readonly=True)"
INTS = "Array(int64, 1, 'C', readonly=True)"
FLAGS = "Array(boolean, 1, 'C', readonly=True)"
HASHES = "Array(uint64, 1, 'C', readonly=True)"
BYTES_OUT, INTS_OUT, FLAGS_OUT = "uint8[::1]", "int64[::1]", "boolean[::1]"
HASHES_OUT = "uint64[::1]"
SHORTS_OUT = "int16[::1]"
PAIRS_OUT = "int64[:, ::1]"
INT, FLAG = "int64", "boolean"
_loading = threading.Lock()
_inner: set[Callable[..., Any]] = set()


@cache
def folder() -> Path:
    """Return the folder of compiled functions for this process. It exists and is writable.

    If the package's folder is read-only, the functions compiled in it (by an image or an administrator) are
    copied into the user's cache: numba only uses folders that it can write. The cache must not be writable by
    other users, because machine code is loaded from it. Without such a folder, a temporary one is created.
    """
    given = os.environ.get(FOLDER_VARIABLE, "").strip()
    if given:
        return _made(Path(given))
    if is_writable(BESIDE):
        return BESIDE
    own = user_cache()
    if own is not None and is_private(own):
        if BESIDE.is_dir():
            shutil.copytree(BESIDE, own, dirs_exist_ok=True, copy_function=_copy_newer)
        return own
    passing = Path(tempfile.mkdtemp(prefix=f"{_NAME}-"))
    log.warning(
        "no writable folder for compiled functions was found, so each start compiles them again; set %s to a"
        " folder that this user can write",
        FOLDER_VARIABLE,
    )
    # Child processes use the same folder.
    os.environ[FOLDER_VARIABLE] = str(passing)
    return passing


def _made(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place


def user_cache() -> Path | None:
    """Return the folder for this package in the user's cache; None without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME
    except RuntimeError:  # no home
        return None


def is_writable(place: Path) -> bool:
    """Return True if this process can write a file into a folder, which is created if necessary."""
    try:
        with tempfile.TemporaryFile(dir=_made(place)):
            return True
    except OSError:
        return False


def is_private(place: Path) -> bool:
    """Return True if a folder, created if necessary, belongs to this user, and no other user may write it."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.lstat()
    except OSError:
        return False
    is_ours = found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and is_writable(place)


def _copy_newer(source: str, target: str) -> str:
    if not Path(target).exists() or Path(target).stat().st_mtime < Path(source).stat().st_mtime:
        shutil.copy2(source, target)
    return target


def inner(function: Callable[..., Any]) -> Any:
    """Mark a function that only compiled functions of its module call: it is compiled into each of them."""
    _inner.add(function)
    return function


class CompiledFunction:
    """A compiled function with one signature, which releases the GIL.

    numba is imported at the first call of any such function: most commands call none.
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
        """Load the machine code from disk, or compile it in this process if it is not there."""
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


def loop(*signature: str) -> Callable[[Callable[..., Any]], CompiledFunction]:
    """Return a decorator that makes a function a Loop. `signature`: the types of its arguments."""
    return lambda function: CompiledFunction(function, signature)


def ensure_compiled() -> None:
    """Wait until the compiled functions are on disk; start processes that compile them if they are not.

    If compiling fails, each process compiles the functions that it calls.
    """
    marker = _marker()
    if marker.exists():
        return
    with _locked(folder() / "compiling"):
        if marker.exists():
            return
        log.info("compiling, first start on this host: 20 seconds, or minutes while other work runs, once")
        began = time.monotonic()
        if _compile_in_processes():
            marker.touch()
            log.info("compiled in %.0f s", time.monotonic() - began)


def is_compiled() -> bool:
    """Return True if the compiled functions are on disk."""
    return _marker().exists()


def begin_compiling() -> None:
    """Start a thread that runs `ensure_compiled`, so that the caller can do other work."""
    threading.Thread(target=ensure_compiled, name="pgrepl-compile", daemon=True).start()


def compile_modules(parent: int, names: Sequence[str]) -> None:
    """Compile every Loop of these modules (named relative to `replication`) in this process.

    The process ends with process `parent`: an orphan would hold its output open, and a shell would wait for
    it. Functions that it has compiled stay on disk.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    for name in names:
        for found in vars(importlib.import_module(f"{_PACKAGE}.{name}")).values():
            if isinstance(found, CompiledFunction):
                found.load()


def _compile_in_processes() -> bool:
    program = (
        f"from {__name__} import compile_modules; import sys; compile_modules({os.getpid()}, sys.argv[1:])"
    )
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
    """Return a hash of everything that makes numba compile again.

    That is the versions of numba and Python, the processor, and the modules' source.
    """
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
    """Hold an exclusive lock on a file, so that only one process of this host runs the block at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _cached_in(place: Path) -> Iterator[None]:
    """Set numba's cache folder for a block, and restore it: numba reads it when a function is decorated."""
    import numba

    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(place)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
