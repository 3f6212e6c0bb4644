"""Explanations of storage errors, found by the error code in the message of obstore, deltalake or pyarrow.

Performs no I/O.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
from deltalake.exceptions import DeltaError
from obstore.exceptions import BaseError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.settings.stores import (
    AWS_KEY_ID,
    AWS_REGION,
    AWS_SECRET,
    AWS_TOKEN,
    AZURE_KEY,
    AZURE_SAS,
    AZURE_SECRET,
    GOOGLE_KEY,
    PAGES,
)

_KEYS = f"check {AWS_KEY_ID} and {AWS_SECRET}, or the connection that lake_conn_id names"
# The store's own answer; Arrow's messages for S3 (known and unknown codes), for Azure and for Google.
_CODE = re.compile(
    r"<Code>(\w+)</Code>|AWS Error (?!UNKNOWN)(\w+)|ExceptionName: (\w+)"
    r"|Azure Error: \[(\w+)\]|google::cloud::Status\((\w+):"
)
# For an answer without a body (as to HEAD), the libraries report only the status; without an answer, only the
# system's error.
_STATUS = re.compile(r"status code:? (\d{3})|HTTP status (\d{3})")
_HOST = re.compile(r"https?://([^/\s]+)|resolve host: (\S+)|connect to (\S+[:.]\S+)")
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
    r"|HTTP status (?:429|5\d\d)"
    # Arrow's client for S3. Codes that it does not know have the status.
    r"|AWS Error (?:SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT)"
    r"|AWS Error NETWORK_CONNECTION"
    # The clients of Google and Azure in Arrow, once they have given up.
    r"|google::cloud::Status\((?:UNAVAILABLE|RESOURCE_EXHAUSTED)"
    r"|Azure Error: \[\w*\] (?:429|5\d\d|Error while sending request|Fail to get a new connection)"
)


class StoreFault(NamedTuple):
    """The explanation of a storage error, and a hint on how to fix it."""

    sentence: str
    hint: str


_UNKNOWN_KEY = StoreFault("the store does not know the access key", _KEYS)
_OTHER_REGION = StoreFault(
    "the bucket is in another region", f"set {AWS_REGION} to the bucket's own, or correct it"
)
_EXPIRED = StoreFault(
    "the token has expired",
    f"get new credentials (on Amazon, including {AWS_TOKEN}). For long runs, grant the hosts a role: its"
    " credentials are renewed automatically",
)
_CLOCK = StoreFault(
    "this host's clock differs from the store's, which therefore rejects signed requests",
    "synchronize the clock of this host, for example with NTP",
)
SLOW = StoreFault("the store throttles requests", "increase flush_interval_s and merge_interval_s")

_UNRESOLVED = StoreFault(
    "the name {host} cannot be resolved (DNS)",
    "check the endpoint of the store and this host's DNS resolver. The next run continues from here",
)
_UNREACHED = StoreFault(
    "cannot connect to the store ({host})",
    "check the endpoint, the network, and that the store is running. The next run continues from here",
)
_SILENT = StoreFault(
    "the store ({host}), or the DNS server that was asked for its address, does not answer",
    "check the network, this host's DNS resolver, and that the store is running. The next run continues from"
    " here",
)
_BROKEN = StoreFault("the store answered with an internal error", "the next run continues from here")

NO_CONDITIONS = StoreFault(
    "the store does not support conditional puts (If-None-Match), which prevent two writers from committing"
    " the same version",
    "keep the lake in a store with conditional puts: Amazon S3, MinIO, Cloudflare R2, versitygw",
)

_NO_BUCKET = StoreFault("there is no such bucket", "create it, or correct `lake` in the pipeline file")
_UNKNOWN_CREDENTIALS = StoreFault(
    "the store does not recognize the credentials", f"check {GOOGLE_KEY}, or the host's identity"
)
_REJECTED_KEY = StoreFault(
    "the store rejects the key or the token",
    f"check {AZURE_KEY}, {AZURE_SAS} or {AZURE_SECRET}, or the connection that lake_conn_id names",
)
_DENIED = StoreFault(
    "the store denies access",
    "allow objects below the lake's folder to be read, written, deleted and listed. See the store's page:"
    f" {PAGES}",
)

# Sources: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and versitygw's own code for
# an unknown key; https://cloud.google.com/storage/docs/xml-api/reference-status, with many of the same codes;
# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
FAULTS = {
    "NoSuchBucket": _NO_BUCKET,
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "XAdminUserNotFound": _UNKNOWN_KEY,
    "SignatureDoesNotMatch": StoreFault("the secret access key is not the access key's", _KEYS),
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": StoreFault(
        "the session token is not valid", f"check {AWS_TOKEN}: it belongs to its access key"
    ),
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "AccessDenied": _DENIED,
    "SlowDown": SLOW,
    "ServiceUnavailable": SLOW,
    "Throttling": SLOW,
    "NotImplemented": NO_CONDITIONS,
    "AuthenticationRequired": _UNKNOWN_CREDENTIALS,
    "InvalidSecurity": _UNKNOWN_CREDENTIALS,
    # Codes of Google's client in Arrow.
    "Unauthenticated": _UNKNOWN_CREDENTIALS,
    "PermissionDenied": _DENIED,
    "ContainerNotFound": _NO_BUCKET,
    "ContainerBeingDeleted": _NO_BUCKET,
    "AuthenticationFailed": _REJECTED_KEY,
    "InvalidAuthenticationInfo": _REJECTED_KEY,
    "AuthorizationFailure": StoreFault(
        f"{_REJECTED_KEY.sentence}, or rejects this host's network",
        f"{_REJECTED_KEY.hint}, and the account's firewall",
    ),
    "AuthorizationPermissionMismatch": _DENIED,
    "InsufficientAccountPermissions": _DENIED,
    "AccountIsDisabled": StoreFault(
        "the storage account is disabled", "enable it, or correct lake in the pipeline"
    ),
    "ServerBusy": SLOW,
    **dict.fromkeys(("NoAuthenticationInformation", "PublicAccessNotPermitted"), _REJECTED_KEY),
    "KeyBasedAuthenticationNotPermitted": StoreFault(
        "the storage account does not allow keys",
        f"set {AZURE_SECRET} to the secret of an application, or grant the hosts a managed identity",
    ),
    "AuthorizationSourceIPMismatch": StoreFault(
        "the token does not allow this host's IP address",
        "create a token that allows it, or grant the hosts a managed identity",
    ),
}
_BY_STATUS = {"403": _DENIED, "429": SLOW, "503": SLOW}
_BY_WORDS = (
    (re.compile(r"dns error|lookup address|resolve host|Name or service not known", re.I), _UNRESOLVED),
    (
        re.compile(
            r"tcp connect error|Connection refused|NETWORK_CONNECTION.{0,60}curlCode: (?!28\b)|CURL error \["
            r"|while sending request|Fail to get a new connection",
            re.I,
        ),
        _UNREACHED,
    ),
    (re.compile(r"operation timed out|source: TimedOut|curlCode: 28\b"), _SILENT),
    (re.compile(r"AWS Error INTERNAL_FAILURE"), _BROKEN),
    (re.compile(r"google::cloud::Status\((?:UNAVAILABLE|RESOURCE_EXHAUSTED)"), SLOW),
)
_BY_LETTERS = {code.lower(): code for code in FAULTS}


def store_error_code(error: BaseException) -> str:
    """Return the store's error code in a library's message, or "" if there is none."""
    match = _CODE.search(str(error))
    found = "" if match is None else next(filter(None, match.groups()))
    return _BY_LETTERS.get(found.replace("_", "").lower(), found)


def find_store_fault(error: BaseException) -> StoreFault | None:
    """Return the explanation of the store's error code, or None if the code is missing or unknown."""
    return FAULTS.get(store_error_code(error))


def status_in(error: BaseException) -> str:
    """Return the HTTP status in a library's message, or "" if there is none."""
    match = _STATUS.search(str(error))
    return "" if match is None else next(filter(None, match.groups()))


def parsable_parts(error: BaseException) -> str:
    """Return the parts of a library's message that this module can parse again: code, status, host.

    The store's answer itself is left out, because it may contain a token.
    """
    text, status = str(error), status_in(error)
    found = [f"<Code>{store_error_code(error)}</Code>", *([f"HTTP status {status}"] if status else [])]
    for words, _ in _BY_WORDS:
        if said := words.search(text):
            host = _HOST.search(text)
            found += [said[0], *([host[0]] if host else [])]
    return " ".join(found)


def explanation_of(error: BaseException) -> StoreFault | None:
    """Return the explanation by error code, HTTP status or cause of a failed connection, or None."""
    if fault := find_store_fault(error) or _BY_STATUS.get(status_in(error)):
        return fault
    text = str(error)
    for words, fault in _BY_WORDS:
        if words.search(text):
            return StoreFault(_naming(fault.sentence, text), fault.hint)
    return None


def _naming(sentence: str, text: str) -> str:
    """Return a sentence with the host that the message names. Arrow's client for Google names none."""
    host = _HOST.search(text)
    if host is None:
        return sentence.replace(" ({host})", "").replace("{host}", "of the store's host")
    return sentence.format(host=next(filter(None, host.groups())))


def is_store_unavailable(error: BaseException) -> bool:
    """Return True if an object store, or the connection to it, failed, so that no table is at fault.

    Only errors of libraries that send requests to a store are considered: the message of another error may
    hold values of rows, which could match by chance.
    """
    return _asks_stores(error) and bool(_AWAY.search(str(error)))


def _asks_stores(error: BaseException) -> bool:
    # DataFusion raises plain exceptions.
    return isinstance(error, (DeltaError, OSError, BaseError, pa.ArrowException)) or type(error) is Exception


def raise_if_store_unavailable(doing: str, error: BaseException) -> None:
    """Raise LakeUnavailableError if an object store failed. `doing` as in `storage_error`."""
    if is_store_unavailable(error):
        raise storage_error(doing, error) from None


def is_storage_error(error: BaseException) -> bool:
    """Return True if an error comes from the storage, and not from the state of a table."""
    return isinstance(error, OSError) or _is_of_store(error) or bool(_MARKS.search(str(error)))


def _is_of_store(error: BaseException) -> bool:
    """Return True if an Arrow exception comes from a store.

    Arrow's clients for Google and Azure raise exceptions other than OSError if they cannot get a token, or if
    the store calls a request invalid.
    """
    if type(error) is pa.ArrowException:
        return True
    return isinstance(error, pa.ArrowInvalid) and "google::cloud::Status(" in str(error)


def is_full(error: BaseException) -> bool:
    """Return True if the error says that no space is left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(number in _FULL for number in system_errors(error))


def system_errors(error: BaseException) -> list[int]:
    """Return the system's error numbers (errno) in a library's message."""
    return [int(number) for number in _NUMBER.findall(str(error))]


def storage_error(doing: str, error: BaseException) -> LakeUnavailableError:
    """Return a LakeUnavailableError for a storage error, with its explanation and a hint.

    `doing`: the failed action, such as "the changelog cannot be written". The text of Delta's error is left
    out, because it may hold values of rows.
    """
    if is_full(error):
        return LakeUnavailableError(
            f"{doing}: the storage is full",
            "free space outside the lake (delete no file below it), then"
            " run this again; it continues from here",
        )
    if fault := explanation_of(error):
        return LakeUnavailableError(f"{doing}: {fault.sentence}", fault.hint)
    return LakeUnavailableError(
        f"{doing}: {_reason(error)}",
        "check that the storage is mounted and reachable, and the rights of the process there",
    )


def _reason(error: BaseException) -> str:
    """Return the system's message, or else the HTTP status, or else the error's class.

    The error's own text is not used: Arrow's errors contain a store's whole answer.
    """
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if status := status_in(error):
        return f"the store answered with HTTP status {status}"
    return type(error).__name__


@contextmanager
def storage_errors(place: str, action: str = "write under") -> Iterator[None]:
    """Turn errors of a filesystem into a LakeError that names the action and the location.

    Missing permission, or a wrong kind of file, becomes LakeError; other storage errors become
    LakeUnavailableError. Arrow exceptions that do not come from a store pass unchanged.
    """
    try:
        yield
    except _FORBIDDEN as error:
        if find_store_fault(error):
            raise storage_error(f"cannot {action} {place}", error) from None
        # Do not quote the error: a store's client may include the request, with the token that signs it.
        raise LakeError(
            f"cannot {action} {place}: {_reason(error)}", "check the rights, and that it is a directory"
        ) from None
    except (OSError, pa.ArrowException) as error:
        if not (isinstance(error, OSError) or _is_of_store(error)):
            raise
        raise storage_error(f"cannot {action} {place}", error) from None


@contextmanager
def delta_errors(doing: str) -> Iterator[None]:
    """Turn Delta's storage errors into LakeUnavailableError; other errors pass unchanged."""
    failed: LakeUnavailableError | None = None
    try:
        yield
    except (DeltaError, OSError) as error:
        if not is_storage_error(error):
            raise
        failed = storage_error(doing, error)
    if failed is not None:
        raise failed
