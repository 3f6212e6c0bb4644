"""The server that tests, demo and benchmarks run on."""


def test_the_embedded_server_has_logical_decoding(pg):
    with pg.cursor() as cursor:
        cursor.execute("show wal_level")
        assert cursor.fetchone() == ("logical",)
        cursor.execute(
            "select 1 from pg_create_logical_replication_slot('x_' || current_database(), 'pgoutput')"
        )
        assert cursor.fetchone() == (1,)
