"""What a store refused, in words. Pure.

The libraries tell it in texts of their own, each with the store's error code in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from airflow_provider_pgrepl.replication.settings.store_variables import (
    AZURE_KEY,
    AZURE_SAS,
    AZURE_SECRET,
    GOOGLE_KEY,
    KEY_ID,
    REGION,
    SECRET,
    TOKEN,
)


class Fault(NamedTuple):
    """What is wrong, and what to do."""

    sentence: str
    hint: str


_KEYS = f"check {KEY_ID} and {SECRET}, or the connection that lake_conn_id names"
_UNKNOWN_KEY = Fault("the store does not know the access key", _KEYS)
_OTHER_REGION = Fault("the bucket is in another region", f"set {REGION} to the bucket's own, or correct it")
_EXPIRED = Fault(
    "the token has expired",
    f"get new credentials, on Amazon {TOKEN} among them; for what runs long, give the hosts a role, which is"
    " renewed",
)
_CLOCK = Fault("this host's clock is not the store's, so that it refuses what is signed", "set the clock")
SLOW = Fault("the store asks for fewer requests", "a larger flush_interval_s and freshness_s ask for less")

_UNRESOLVED = Fault(
    "the name {} cannot be resolved (DNS)",
    "check the endpoint of the store, and this host's resolver; the next run goes on where this one stopped",
)
_UNREACHED = Fault(
    "no connection to the store ({}) can be made",
    "check its endpoint, the network, and that it is up; the next run goes on where this stopped",
)

NO_CONDITIONS = Fault(
    "the store does not refuse to write an object that is there (If-None-Match), by which commits of two"
    " writers are kept apart",
    "keep the lake in a store that does: Amazon S3, MinIO, Cloudflare R2, versitygw",
)

_NO_BUCKET = Fault("there is no such bucket", "make it, or correct lake in the pipeline")
_NOBODYS = Fault(
    "the store takes the credentials for nobody's", f"check {GOOGLE_KEY}, or the host's identity"
)
_NOT_TAKEN = Fault(
    "the store does not take the key or the token",
    f"check {AZURE_KEY}, {AZURE_SAS} or {AZURE_SECRET}, or the connection that lake_conn_id names",
)
_DENIED = Fault(
    "the store denies access",
    "allow objects below the lake's folder to be read, written, deleted and listed:"
    " docs/how-to/keep-the-lake-on-s3.md, -on-gcs.md and -on-azure.md say how",
)

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and versitygw's own of a key;
# https://cloud.google.com/storage/docs/xml-api/reference-status, which has many of the same;
# https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
FAULTS = {
    "NoSuchBucket": _NO_BUCKET,
    "InvalidAccessKeyId": _UNKNOWN_KEY,
    "XAdminUserNotFound": _UNKNOWN_KEY,
    "SignatureDoesNotMatch": Fault("the secret access key is not the access key's", _KEYS),
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": Fault("the session token is not valid", f"check {TOKEN}: it belongs to its access key"),
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "AuthorizationHeaderMalformed": _OTHER_REGION,
    "PermanentRedirect": _OTHER_REGION,
    "AccessDenied": _DENIED,
    "SlowDown": SLOW,
    "ServiceUnavailable": SLOW,
    "NotImplemented": NO_CONDITIONS,
    "AuthenticationRequired": _NOBODYS,
    "InvalidSecurity": _NOBODYS,
    # As Google's client for Arrow says of any of them.
    "Unauthenticated": _NOBODYS,
    "PermissionDenied": _DENIED,
    "ContainerNotFound": _NO_BUCKET,
    "ContainerBeingDeleted": _NO_BUCKET,
    "AuthenticationFailed": _NOT_TAKEN,
    "InvalidAuthenticationInfo": _NOT_TAKEN,
    "AuthorizationFailure": Fault(
        f"{_NOT_TAKEN.sentence}, or nobody from this host's network",
        f"{_NOT_TAKEN.hint}, and the account's firewall",
    ),
    "AuthorizationPermissionMismatch": _DENIED,
    "InsufficientAccountPermissions": _DENIED,
    "AccountIsDisabled": Fault(
        "the storage account is disabled", "enable it, or correct lake in the pipeline"
    ),
    "ServerBusy": SLOW,
    **dict.fromkeys(("NoAuthenticationInformation", "PublicAccessNotPermitted"), _NOT_TAKEN),
    "KeyBasedAuthenticationNotPermitted": Fault(
        "the storage account does not allow keys",
        f"give an application by {AZURE_SECRET}, or an identity of the host's",
    ),
    "AuthorizationSourceIPMismatch": Fault(
        "the token is not for this host's address", "get one that is, or give the hosts an identity"
    ),
}
# As the store spells it; as Arrow does of S3, and where it knows no name of its own; of Azure, and of Google.
_CODE = re.compile(
    r"<Code>(\w+)</Code>|AWS Error (?!UNKNOWN)(\w+)|ExceptionName: (\w+)"
    r"|Azure Error: \[(\w+)\]|google::cloud::Status\((\w+):"
)
# Of an answer without a body, as to HEAD, the libraries tell the status alone; of none, what the system said.
_STATUS = re.compile(r"status code:? (\d{3})|HTTP status (\d{3})")
_BY_STATUS = {"403": _DENIED, "429": SLOW, "503": SLOW}
_BY_WORDS = (
    (re.compile(r"dns error|lookup address|resolve host|Name or service not known", re.I), _UNRESOLVED),
    (re.compile(r"tcp connect error|Connection refused|curlCode: 7\b", re.I), _UNREACHED),
)
_HOST = re.compile(r"https?://([^/\s]+)|resolve host: (\S+)|connect to (\S+[:.]\S+)")
_BY_LETTERS = {code.lower(): code for code in FAULTS}


def code_in(error: BaseException) -> str:
    """The store's error code that a library passes on; empty when there is none."""
    match = _CODE.search(str(error))
    found = "" if match is None else next(filter(None, match.groups()))
    return _BY_LETTERS.get(found.replace("_", "").lower(), found)


def fault_of(error: BaseException) -> Fault | None:
    """None when the store has said nothing that is known here."""
    return FAULTS.get(code_in(error))


def status_in(error: BaseException) -> str:
    """The HTTP status that a library passes on; empty when there is none."""
    match = _STATUS.search(str(error))
    return "" if match is None else next(filter(None, match.groups()))


def facts_in(error: BaseException) -> str:
    """What a library passes on of a refusal, in words that are understood here: the store's answer, which may
    tell a token, is not among them."""
    text, status = str(error), status_in(error)
    found = [f"<Code>{code_in(error)}</Code>", *([f"HTTP status {status}"] if status else [])]
    for words, _ in _BY_WORDS:
        if said := words.search(text):
            host = _HOST.search(text)
            found += [said[0], *([host[0]] if host else [])]
    return " ".join(found)


def explanation_of(error: BaseException) -> Fault | None:
    """Likewise `fault_of`, or by the HTTP status alone, or by why no connection was made."""
    if fault := fault_of(error) or _BY_STATUS.get(status_in(error)):
        return fault
    text = str(error)
    for words, fault in _BY_WORDS:
        if words.search(text):
            host = _HOST.search(text)
            name = "of the store's host" if host is None else next(filter(None, host.groups()))
            return Fault(fault.sentence.format(name), fault.hint)
    return None
