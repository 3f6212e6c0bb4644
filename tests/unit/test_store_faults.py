"""storage/errors.py: what a store refused, from the texts of three libraries."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.replication.storage.errors import (
    FAULTS,
    SLOW,
    explanation_of,
    find_store_fault,
    is_store_unavailable,
    parsable_parts,
    storage_error,
    store_error_code,
)


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
    assert store_error_code(OSError(text)) == code
    assert find_store_fault(OSError(text)) == FAULTS[code]


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
    assert find_store_fault(OSError(text)) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "Error performing GET http://lake.invalid:9000/b/x in 107ms - HTTP error | error sending request"
            " | client error (Connect) | dns error | failed to lookup address information",
            "the name lake.invalid:9000 cannot be resolved (DNS)",
        ),
        (
            "AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 6, Could not resolve"
            " hostname; Details: Could not resolve host: lake.invalid",
            "the name lake.invalid cannot be resolved (DNS)",
        ),
        (
            "AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7, Could not connect to"
            " server; Details: Failed to connect to 127.0.0.1:9 after 0 ms",
            "cannot connect to the store (127.0.0.1:9)",
        ),
        (
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of <?xml …",
            SLOW.sentence,
        ),
        (
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork()"
            " - CURL error [52]=Server returned nothing (no headers, no data)",
            "cannot connect to the store",
        ),
        (
            "google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of PerformWork()"
            " - CURL error [6]=Could not resolve hostname error_info={reason=, domain=, metadata={…",
            "the name of the store's host cannot be resolved (DNS)",
        ),
        (
            "Check for Hierarchical Namespace support on 'http://lake.invalid:9000/a/b' failed. Azure Error:"
            " [] Fail to get a new connection for: http://lake.invalid:9000. Could not resolve hostname",
            "the name lake.invalid:9000 cannot be resolved (DNS)",
        ),
        (
            "Check for Hierarchical Namespace support on 'http://127.0.0.1:9/a/b' failed. Azure Error: []"
            " Fail to get a new connection for: http://127.0.0.1:9. Could not connect to server",
            "cannot connect to the store (127.0.0.1:9)",
        ),
        (
            "AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 28, Timeout was reached;"
            " Details: Resolving timed out after 1000 milliseconds",
            "the store, or the DNS server that was asked for its address, does not answer",
        ),
        (
            "Kernel error -> Generic S3 error ↳ Error performing GET http://lake:9000/b/x/_delta_log"
            " in 5.1s, after 2 retries - HTTP error ↳ error sending request ↳ operation timed out",
            "the store (lake:9000), or the DNS server that was asked for its address, does not answer",
        ),
        (
            "Generic S3 error: Error performing HEAD http://lake:9000/b/x in 5.1s - HTTP error: error"
            " sending request Debug source: kind: Timeout, source: reqwest::Error { source: TimedOut, }",
            "the store (lake:9000), or the DNS server that was asked for its address, does not answer",
        ),
        (
            "AWS Error NETWORK_CONNECTION during PutObject operation: curlCode: 56, Failure when receiving"
            " data from the peer; Details: Recv failure: Connection reset by peer",
            "cannot connect to the store",
        ),
        ("AWS Error THROTTLING during PutObject operation: Rate exceeded", SLOW.sentence),
        (
            "AWS Error INTERNAL_FAILURE during PutObject operation: We encountered an internal error.",
            "the store answered with an internal error",
        ),
        (
            "Check for Hierarchical Namespace support on 'http://a/b' failed. Azure Error: [] Error while"
            " sending request. Failure when receiving data from the peer",
            "cannot connect to the store (a)",
        ),
        ("Failed to list blobs: … Azure Error: [ServerBusy] 503 Service Unavailable", SLOW.sentence),
        ("Error performing HEAD http://s/b/x - Server returned non-2xx status code: 503 …", SLOW.sentence),
        ("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.", SLOW.sentence),
    ],
)
def test_an_answer_without_body_and_a_store_that_is_not_reached_are_explained(text, says):
    explanation = explanation_of(OSError(text))
    assert explanation is not None
    assert explanation.sentence == says
    # Nor is it lost where the text itself is not passed on.
    assert explanation_of(OSError(parsable_parts(OSError(text)))) == explanation


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("Kernel error -> Generic S3 error: Error performing GET … 503 Service Unavailable", True),
        ("External error: Object Store error: Generic MicrosoftAzure error: error sending request", True),
        ("b/x.json: GenericError <Code></Code> HTTP status 503", True),
        ("AWS Error SLOW_DOWN during PutObject operation", True),
        ("AWS Error SERVICE_UNAVAILABLE during PutObject operation: Reduce your request rate", True),
        ("AWS Error THROTTLING during PutObject operation: Rate exceeded", True),
        ("AWS Error INTERNAL_FAILURE during PutObject operation: We encountered an internal error.", True),
        ("AWS Error REQUEST_TIMEOUT during PutObject operation: Your socket connection …", True),
        ("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 6, Could not resolve …", True),
        ("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation: The specified bucket …", False),
        ("AWS Error ACCESS_DENIED during PutObject operation: Access Denied", False),
        ("google::cloud::Status(UNAVAILABLE: Retry policy exhausted, with a last message of …", True),
        ("google::cloud::Status(PERMISSION_DENIED: Permanent error, with a last message …", False),
        ("GetFileInfo … Azure Error: [ServerBusy] 503 Service Unavailable", True),
        ("GetFileInfo … Azure Error: [] Error while sending request. Failure when …", True),
        ("… Azure Error: [] Fail to get a new connection for: http://a:9. Could not resolve hostname", True),
        ("GetProperties failed for 'http://…'. Azure Error: [AuthorizationFailure] 403 …", False),
        ("AWS Error UNKNOWN (HTTP status 500) during HeadObject operation: No response body.", True),
        (
            "Generic LocalFileSystem error: Unable to open file /x: Permission denied (os error 13)",
            False,
        ),
        ("Object at location lake/x not found: … 404 Not Found", False),
        ("Generic DeltaTable error: the log is not whole", False),
    ],
)
def test_store_that_is_away_is_told_from_a_table_at_fault(text, away):
    assert is_store_unavailable(OSError(text)) is away


def test_a_status_that_is_not_known_is_named():
    error = OSError("AWS Error UNKNOWN (HTTP status 507) during HeadObject operation: No response body.")
    assert "the store answered with HTTP status 507" in storage_error("nothing was written", error).message
