"""What a store that speaks S3 refused, in words. Pure.

The libraries tell it in texts of their own, each with the store's error code in it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from airflow_provider_pgrepl.replication.store_variables import KEY_ID, REGION, SECRET, TOKEN


class Fault(NamedTuple):
    """What is wrong, and what to do."""

    sentence: str
    hint: str


_KEYS = f"check {KEY_ID} and {SECRET}, or the connection that lake_conn_id names"
_UNKNOWN_KEY = Fault("the store does not know the access key", _KEYS)
_OTHER_REGION = Fault("the bucket is in another region", f"set {REGION} to the bucket's own, or correct it")
_EXPIRED = Fault(
    "the session token has expired",
    f"get new credentials, {TOKEN} among them; for what runs long, give the hosts a role, which is renewed",
)
_CLOCK = Fault("this host's clock is not the store's, so that it refuses what is signed", "set the clock")
_SLOW = Fault("the store asks for fewer requests", "a larger flush_interval_s and freshness_s ask for less")

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and versitygw's own of a key.
FAULTS = {
    "NoSuchBucket": Fault("there is no such bucket", "make it, or correct lake in the pipeline"),
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
    "AccessDenied": Fault(
        "the store denies access",
        "allow s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket under the lake's folder",
    ),
    "SlowDown": _SLOW,
}
# As the three libraries spell them, letters only.
_SPELLED = {code.lower(): fault for code, fault in FAULTS.items()}


def fault_of(error: BaseException) -> Fault | None:
    """None when the store has said nothing that is known here."""
    letters = re.sub("[^a-z]", "", str(error).lower())
    return next((fault for code, fault in _SPELLED.items() if code in letters), None)
