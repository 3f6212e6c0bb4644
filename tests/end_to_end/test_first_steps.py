"""The whole way, by the apps as users run them: snapshot, then changes, then equal."""

from tests.support.replicated import Replicated, execute

SETUP = (
    "create table items(id int primary key, name text, price numeric(10,2),"
    " at timestamptz default now(), raw bytea)",
    "insert into items select g, 'item ' || g, g * 1.5, now(), decode(to_hex(g), 'escape')"
    " from generate_series(1, 1000) g",
    "create table history(at timestamp, what text)",
)


def test_lake_equals_source_after_snapshot_and_changes(dsn, tmp_path):
    execute(dsn, *SETUP)
    replicated = Replicated(
        dsn, tmp_path, ("public.items", "public.history"), insert_only=("public.history",)
    )
    replicated.snapshot()
    replicated.assert_equal("public.items", "public.history")

    execute(
        dsn,
        "insert into history select now(), 'event ' || g from generate_series(1, 50) g",
        "update items set name = 'changed', price = null where id % 3 = 0",
        "delete from items where id % 7 = 0",
        "update items set id = -id where id < 10",
        "insert into items values (5000, 'new', 1, '2024-01-01', null)",
    )
    replicated.catch_up()
    replicated.assert_equal("public.items", "public.history")

    execute(dsn, "truncate items", "insert into items(id) values (1)")
    replicated.catch_up()
    replicated.assert_equal("public.items", "public.history")


def test_lake_that_cannot_be_written_leaves_no_slot_behind(dsn, tmp_path, pg):
    execute(dsn, "create table items(id int primary key)")
    (tmp_path / "lake").write_text("not a folder")
    replicated = Replicated(dsn, tmp_path, ("public.items",))
    assert replicated.run("snapshot") == 78, replicated.log_tail()
    with pg.cursor() as cursor:
        cursor.execute("select slot_name from pg_replication_slots where database = current_database()")
        assert cursor.fetchall() == []
