"""What it means when the storage refuses: it is full, or away. Delta's errors say so in words only."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.storage.errors import explanation_of, fault_of, status_in

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (PermissionError, NotADirectoryError, FileExistsError)
# Rust's standard library ends its message with the number of the system's error.
_NUMBER = re.compile(r"\(os error (\d+)\)")
_MARKS = re.compile(
    r"os error|No space left|error sending request|timed out"
    r"|Generic (?!DeltaTable|error|delta kernel)\w+ error"
)


_AWAY = re.compile(
    r"error sending request|GenericError|Generic (?!DeltaTable|error|delta kernel|LocalFileSystem)\w+ error"
    r"|HTTP status (?:429|5\d\d)|AWS Error SLOW_DOWN"
)


def is_away(error: BaseException) -> bool:
    """Whether an object store, or the way to it, failed, so that nothing is known of what was asked for: then
    it is at fault, and no table. Only a library that asks a store is believed: the text of other errors may
    hold values of rows, which may read like anything."""
    return _asks_stores(error) and bool(_AWAY.search(str(error)))


def _asks_stores(error: BaseException) -> bool:
    # DataFusion's are plain exceptions.
    return isinstance(error, (DeltaError, OSError, BaseError, pa.ArrowException)) or type(error) is Exception


def raise_if_away(doing: str, error: BaseException) -> None:
    """Raise LakeUnavailableError where a store is away. `doing` as in `refusal`."""
    if is_away(error):
        raise refusal(doing, error) from None


def is_refusal(error: BaseException) -> bool:
    """Whether the storage refused, rather than that a table is at fault."""
    return isinstance(error, OSError) or _is_of_store(error) or bool(_MARKS.search(str(error)))


def _is_of_store(error: BaseException) -> bool:
    """Arrow's clients of Google's and Azure's stores raise what is no OSError, where a token cannot be had or
    a request is called invalid."""
    if type(error) is pa.ArrowException:
        return True
    return isinstance(error, pa.ArrowInvalid) and "google::cloud::Status(" in str(error)


def is_full(error: BaseException) -> bool:
    """Whether there was no space left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(number in _FULL for number in system_errors(error))


def system_errors(error: BaseException) -> list[int]:
    """The numbers of the system's errors that a library passes on."""
    return [int(number) for number in _NUMBER.findall(str(error))]


def refusal(doing: str, error: BaseException) -> LakeUnavailableError:
    """`doing`: what was tried, as "the changelog cannot be written".

    Tells no text of Delta's, which may hold values of rows.
    """
    if is_full(error):
        return LakeUnavailableError(
            f"{doing}: the storage is full", "free some space, then run it again: it goes on where it stopped"
        )
    if fault := explanation_of(error):
        return LakeUnavailableError(f"{doing}: {fault.sentence}", fault.hint)
    return LakeUnavailableError(
        f"{doing}: {_reason(error)}",
        "check that the process may write there, and that the storage can be reached",
    )


def _reason(error: BaseException) -> str:
    """Arrow's errors have a store's whole answer where others have the system's word."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if status := status_in(error):
        return f"the store answered with HTTP status {status}"
    return type(error).__name__


@contextmanager
def storage_errors(place: str) -> Iterator[None]:
    """Turn what a filesystem raises into a LakeError that names the place; only some of it may pass."""
    try:
        yield
    except _FORBIDDEN as error:
        if fault_of(error):
            raise refusal(f"cannot write under {place}", error) from None
        # A store's client may tell the request in its text, with the token that signs it.
        raise LakeError(
            f"cannot write under {place}: {_reason(error)}", "check the rights, and that it is a directory"
        ) from None
    except (OSError, pa.ArrowException) as error:
        if not (isinstance(error, OSError) or _is_of_store(error)):
            raise
        raise refusal(f"cannot write under {place}", error) from None


@contextmanager
def delta_errors(doing: str) -> Iterator[None]:
    """Turn what Delta raises when the storage refuses into ours; all else passes."""
    failed: LakeUnavailableError | None = None
    try:
        yield
    except (DeltaError, OSError) as error:
        if not is_refusal(error):
            raise
        failed = refusal(doing, error)
    if failed is not None:
        raise failed
