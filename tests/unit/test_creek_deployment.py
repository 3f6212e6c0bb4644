"""creek's environment variables, as a pipeline."""

from __future__ import annotations

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.creek.deployment import Deployment
from airflow_provider_pgrepl.replication.postgres.names import TableName

GIVEN = {
    "PG_URI": "postgres://creek:s%40cret@db:5432/shop?sslmode=require&pool_max_conns=10",
    "PG_PUBLICATION_NAME": "creek_pub",
    "PG_PUBLICATION_SLOT": "Creek_slot",
    "PG_TABLES": "public.orders, public.lines",
    "NATS_URI": "nats://nats:4222",
    "PGREPL_LAKE": "/lake",
}
ORDERS = TableName("public", "orders")
WITH_LAKE = '{"lake_tables": "all"}'


def test_creeks_variables_make_a_pipeline_with_one_publisher():
    deployment = Deployment.of({**GIVEN, "NATS_NAMESPACE": "EVENTS", "PROMETHEUS_PORT": "9000"})
    pipeline = deployment.pipeline([ORDERS])
    assert deployment.dsn == "postgres://creek:s%40cret@db:5432/shop?sslmode=require"
    assert deployment.tables == (ORDERS, TableName("public", "lines"))
    assert (pipeline.name, pipeline.lake, pipeline.tables) == ("creek_slot", "/lake", ("public.orders",))
    assert (pipeline.publication, pipeline.publication_mode) == ("creek_pub", "use")
    # creek's own slot stays creek's.
    assert pipeline.slot == "pgrepl_creek_slot"
    publisher = pipeline.publisher("creek")
    assert (publisher.target, publisher.namespace, publisher.database) == ("nats", "EVENTS", "shop")
    assert publisher.metrics == "0.0.0.0:9000"


@pytest.mark.parametrize("space", ["%20", "+"])
def test_spaces_in_the_uri_are_read_by_libpq_as_creek_reads_them(space: str):
    deployment = Deployment.of({**GIVEN, "PG_URI": f"postgres://db/shop?options=-c{space}jit%3Doff"})
    assert psycopg2.extensions.parse_dsn(deployment.dsn)["options"] == "-c jit=off"


def test_missing_variables_get_creek_defaults():
    deployment = Deployment.of(GIVEN)
    publisher = deployment.pipeline([ORDERS]).publisher("creek")
    assert (publisher.namespace, publisher.metrics, deployment.log_level) == ("CREEK", "0.0.0.0:7779", "info")
    assert deployment.without_effect == ()


def test_settings_of_the_publisher_can_be_said_and_no_null_is_sent_for_what_is_not_known():
    assert Deployment.of(GIVEN).pipeline([ORDERS]).publisher("creek").unchanged == "require"
    options = '{"wire": "v1", "on_error": "skip_and_record", "unchanged": "fill"}'
    given = {**GIVEN, "PGREPL_PUBLISHER_OPTIONS": options, "PGREPL_PIPELINE_OPTIONS": WITH_LAKE}
    publisher = Deployment.of(given).pipeline([ORDERS]).publisher("creek")
    assert (publisher.wire, publisher.on_error, publisher.unchanged) == ("v1", "skip_and_record", "fill")
    with pytest.raises(
        ConfigError, match="PGREPL_PUBLISHER_OPTIONS: namespace: creek's own variables set this already"
    ):
        Deployment.of({**GIVEN, "PGREPL_PUBLISHER_OPTIONS": '{"namespace": "X"}'})


def test_there_are_no_lake_tables_unless_they_are_asked_for():
    assert Deployment.of(GIVEN).pipeline([ORDERS]).lake_tables == "none"
    given = {**GIVEN, "PGREPL_PIPELINE_OPTIONS": WITH_LAKE}
    assert Deployment.of(given).pipeline([ORDERS]).lake_tables == "all"
    with pytest.raises(ConfigError, match="unchanged: 'fill' does not go with lake_tables: none"):
        Deployment.of({**GIVEN, "PGREPL_PUBLISHER_OPTIONS": '{"unchanged": "fill"}'}).pipeline([ORDERS])


def test_no_secret_is_shown():
    shown = repr(Deployment.of({**GIVEN, "NATS_URI": "nats://user:hidden@nats:4222"}))
    assert "cret" not in shown
    assert "hidden" not in shown


def test_variables_that_creek_has_and_does_not_use_are_named():
    given = {**GIVEN, "NATS_TIMEOUT": "30s", "NATS_RETENTION_MAX_AGE": "24h", "PG_MESSAGE_TIMEOUT": " "}
    assert Deployment.of(given).without_effect == ("NATS_TIMEOUT", "NATS_RETENTION_MAX_AGE")


def test_more_of_the_pipeline_file_can_be_said():
    options = '{"insert_only": ["public.log"], "trust_table_owners": true, "slot": "mine"}'
    pipeline = Deployment.of({**GIVEN, "PGREPL_PIPELINE_OPTIONS": options}).pipeline(
        [ORDERS, TableName("public", "log")]
    )
    assert (pipeline.insert_only, pipeline.trust_table_owners, pipeline.slot) == (
        ("public.log",),
        True,
        "mine",
    )


def test_the_endpoint_of_metrics_is_left_out_with_port_0():
    assert (
        Deployment.of({**GIVEN, "PROMETHEUS_PORT": "0"}).pipeline([ORDERS]).publisher("creek").metrics == ""
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"PG_URI": "", "NATS_URI": " "}, "PG_URI, NATS_URI: not set"),
        ({"PG_URI": "postgres://u:s%40cret@db:5432"}, "PG_URI: names no database"),
        ({"PG_URI": "postgres://u:s%40cret@[db/shop"}, "PG_URI: cannot be read"),
        ({"PG_URI": "postgres://u:s%40cret@db/shop?nonsense=1"}, "PG_URI: cannot be read"),
        ({"PG_TABLES": "orders"}, "PG_TABLES: 'orders' is not a schema-qualified"),
        ({"PGREPL_PIPELINE_OPTIONS": "{"}, "PGREPL_PIPELINE_OPTIONS: is not JSON"),
        ({"PGREPL_PIPELINE_OPTIONS": "[]"}, "PGREPL_PIPELINE_OPTIONS: must be an object"),
        ({"PGREPL_PIPELINE_OPTIONS": '{"lake": "/x"}'}, "lake: creek's own variables set this already"),
        ({"PROMETHEUS_PORT": "x"}, "metrics"),
        ({"PGREPL_PIPELINE_OPTIONS": '{"nonsense": 1}'}, "nonsense: unknown key"),
        ({"NATS_NAMESPACE": "a.b"}, "namespace"),
    ],
)
def test_unusable_variable_is_named_in_error_without_secrets(given: dict[str, str], says: str):
    with pytest.raises(ConfigError) as caught:
        Deployment.of({**GIVEN, **given}).pipeline([ORDERS])
    assert says in str(caught.value)
    assert "cret" not in str(caught.value)
