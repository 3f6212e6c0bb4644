"""storage/store_faults.py: what a store refused, from the texts of three libraries."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.storage.store_faults import FAULTS, code_in, fault_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("… 403 Forbidden: <Error><Code>SignatureDoesNotMatch</Code><Message>", "SignatureDoesNotMatch"),
        ("AWS Error SIGNATURE_DOES_NOT_MATCH during PutObject operation: …", "SignatureDoesNotMatch"),
        (
            "AWS Error UNKNOWN (HTTP status 400) during PutObject operation: Unable to parse ExceptionName:"
            " AuthorizationHeaderMalformed Message: …",
            "AuthorizationHeaderMalformed",
        ),
        ("AWS Error SLOW_DOWN during PutObject operation", "SlowDown"),
        (
            "google::cloud::Status(PERMISSION_DENIED: Permanent error, with a last message …",
            "PermissionDenied",
        ),
        (
            "GetProperties failed for 'http://…'. Azure Error: [AuthorizationFailure] 403 …",
            "AuthorizationFailure",
        ),
        ("PUT … 404 Not Found: <Error>\n  <Code>ContainerNotFound</Code>", "ContainerNotFound"),
    ],
)
def test_a_code_is_found_as_each_library_spells_it(text, code):
    assert code_in(OSError(text)) == code
    assert fault_of(OSError(text)) == FAULTS[code]


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 5] Input/output error: '/lake/public/access_denied_log/x.parquet'",
        "Error performing PUT https://slow-down.s3.amazonaws.com/x: error sending request",
        "<Error><Code>TeaPot</Code></Error>",
        "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of …",
        "",
    ],
)
def test_a_name_is_no_code(text):
    assert fault_of(OSError(text)) is None
