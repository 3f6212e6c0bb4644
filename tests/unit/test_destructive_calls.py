"""Each call site that deletes, replaces, renames or drops, with the evidence that is asked for before.

A new one fails here until it is listed, and its evidence is one that the reference page explains.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_provider_pgrepl"
PAGE = ROOT / "docs" / "reference" / "what-we-change.md"
Site = tuple[str, str, str]

_CALLS = {
    "advance_slot", "clean_log", "delete", "delete_below", "delete_dir", "delete_file", "delete_files",
    "delete_sql", "delete_tree", "delete_uncommitted", "drop_lake_tables", "drop_publication",
    "drop_slot", "drop_system_folder", "drop_tables", "drop_unused", "forget_pipeline",
    "remove_private_folder", "remove_schema", "remove_table", "rename", "replace_files", "rmdir",
    "rmtree", "set_aside", "set_aside_commits", "truncate", "uninstall", "unlink", "update_stream",
    "vacuum",
}  # fmt: skip
# At the beginning of a statement, or of a part of it: WITH gone AS (DELETE …
_SQL = re.compile(
    r"(?:.*?\bAS \()?\s*(?:ALTER PUBLICATION \S* ?)?(DROP_REPLICATION_SLOT|DROP|DELETE FROM|TRUNCATE) ",
    re.DOTALL,
)
_EVIDENCE = re.compile(r"^\| ([a-z ]+) \|", re.MULTILINE)

_CALLER = "asked for by the caller"
_EMPTY = "an empty folder: the system refuses any other"
_NOTHING = "values in memory"
_ADDS = "subjects are added, none is taken away"
_HINT = "a statement that an error proposes"

_CLAIM = "replication/app/source_ownership.py"

SITES: dict[Site, str] = {
    ("hooks/replication.py", "drop_publication", "drop_publication"): "your request",
    ("hooks/replication.py", "drop_slot", "drop_slot"): "your request",
    ("spark_driver/process.py", "remove", "remove_private_folder"): "private folder",
    ("spark_driver/claim.py", "claim", "remove_private_folder"): "private folder",
    ("spark_driver/process.py", "remove_private_folder", "rmtree"): "private folder",
    ("spark_driver/supervisor.py", "write", "unlink"): "private folder",
    ("spark_driver/supervisor.py", "write_whole", "replace"): "private folder",
    ("operators/spark_app.py", "_execute_on_cluster", "rmtree"): "just made",
    ("replication/runtime/spark_submit.py", "make_class_archive", "replace"): "class archive",
    ("replication/runtime/spark_submit.py", "make_class_archive", "unlink"): "class archive",
    ("replication/runtime/file_locks.py", "take", "truncate"): "private folder",
    ("replication/app/creek/service.py", "run", "rmtree"): "just made",
    ("replication/app/source_snapshots.py", "_copied", "truncate"): "just made",
    ("replication/app/source_snapshots.py", "_copy_range", "truncate"): "just made",
    ("replication/app/creek/service.py", "_write_file", "replace"): "changelog",
    ("replication/app/health_check.py", "_give_up", "drop_slot"): "slot",
    ("replication/app/operations/removal.py", "_unpublish", "drop_tables"): "publication",
    ("replication/app/operations/removal.py", "_drop", "drop_lake_tables"): "only our commits",
    ("replication/app/operations/teardown.py", "_slot", "drop_slot"): "slot",
    ("replication/app/operations/teardown.py", "_event_trigger", "uninstall"): "event trigger",
    ("replication/app/operations/teardown.py", "_publication", "drop_publication"): "publication",
    ("replication/app/operations/teardown.py", "_lake", "drop_lake_tables"): "only our commits",
    ("replication/app/operations/teardown.py", "_lake", "remove_table"): "state schema",
    ("replication/app/operations/teardown.py", "_lake", "drop_system_folder"): "changelog",
    ("replication/app/operations/teardown.py", "_state", "forget_pipeline"): "state schema",
    ("replication/app/operations/teardown.py", "_state", "remove_schema"): "state schema",
    ("replication/app/snapshot_tables.py", "_make_epoch", "drop_slot"): "slot",
    (_CLAIM, "drop_slot", "drop_slot"): "slot",
    ("replication/app/snapshot_tables.py", "_begin", "drop_unused"): "just made",
    ("replication/app/snapshot_tables.py", "_open_epoch", "drop_unused"): "just made",
    (_CLAIM, "prepare_publication", "drop_publication"): "publication",
    (_CLAIM, "_drop_former", "drop_slot"): "slot",
    ("replication/app/copy_states.py", "withdraw", "drop_tables"): "publication",
    ("replication/app/copy_states.py", "_restore", "remove_table"): "just made",
    (_CLAIM, "_drop_former", "drop_publication"): "publication",
    (_CLAIM, "_drop_made", "drop_publication"): "just made",
    ("replication/app/source_problems.py", "protect_source", "drop_tables"): "publication",
    ("replication/app/recovery.py", "set_aside_torn_commits", "set_aside"): "changelog",
    ("replication/changelog/maintenance.py", "_join_hour", "replace_files"): "fence",
    ("replication/changelog/writer.py", "write", "delete_files"): "just made",
    ("replication/changelog/writer.py", "discard", "delete_files"): "just made",
    ("replication/changelog/maintenance.py", "_remove", "replace_files"): "fence",
    ("replication/creek/copy_database.py", "loading", "DELETE FROM"): "consumer record",
    ("replication/creek/copy_database.py", "_run", "TRUNCATE"): "consumer record",
    ("replication/creek/copy_database.py", "_run", "delete_sql"): "consumer record",
    ("replication/creek/table_shape.py", "delete_sql", "DELETE FROM"): "consumer record",
    ("replication/creek/streams.py", "make", "update_stream"): _ADDS,
    ("replication/events/publish/record.py", "take", "set_aside"): "changelog",
    ("replication/lake/sequences.py", "read", "set_aside"): "changelog",
    ("replication/lake/delta/live_files.py", "settle_log", "set_aside"): "app id",
    ("replication/lake/snapshot/range_copy.py", "run", "delete_uncommitted"): "just made",
    ("replication/lake/snapshot/kept_ranges.py", "_delete_unless_table", "delete_uncommitted"): "file name",
    ("replication/lake/snapshot/kept_ranges.py", "leave", "delete_uncommitted"): "just made",
    ("replication/lake/snapshot/kept_ranges.py", "forget", "delete_files"): "own folder",
    ("replication/lake/snapshot/kept_ranges.py", "expire", "delete_files"): "own folder",
    ("replication/lake/snapshot/kept_ranges.py", "remove_empty_folders", "rmdir"): _EMPTY,
    ("replication/lake/verify/kept_sums.py", "_delete", "delete_files"): "own folder",
    ("replication/lake/delta/parquet_writer.py", "delete_uncommitted", "delete_files"): _CALLER,
    ("replication/lake/delta/parquet_writer.py", "discard", "delete_files"): "just made",
    ("replication/lake/delta/commit.py", "_of_features", "DROP"): _HINT,
    ("replication/lake/delta/commit.py", "_of_rows", "DROP"): _HINT,
    ("replication/lake/delta/snapshot_commit.py", "commit_snapshot", "replace_files"): "app id",
    ("replication/lake/delta/vacuum.py", "_delete", "delete_files"): "file name",
    ("replication/lake/delta/vacuum.py", "_delete_folders", "rmdir"): _EMPTY,
    ("replication/lake/drop.py", "drop_system_folder", "delete_tree"): "changelog",
    ("replication/lake/drop.py", "drop_system_folder", "delete_files"): "changelog",
    ("replication/lake/drop.py", "_drop_table", "delete_tree"): "only our commits",
    ("replication/lake/drop.py", "_delete_with_log_last", "delete_files"): "only our commits",
    ("replication/lake/drop.py", "_remove_empty_folders", "rmdir"): _EMPTY,
    ("replication/lake/drop.py", "_delete_if_empty", "rmdir"): _EMPTY,
    ("replication/lake/schema_evolution/evolution.py", "rewrite", "replace_files"): "fence",
    ("replication/lake/history/versions.py", "rows", "delete"): _NOTHING,
    ("replication/lake/maintenance.py", "_maintain", "vacuum"): "app id",
    ("replication/lake/maintenance.py", "_maintain", "clean_log"): "app id",
    ("replication/lake/maintenance.py", "_maintain_changelog", "vacuum"): "changelog",
    ("replication/lake/maintenance.py", "_maintain_changelog", "clean_log"): "changelog",
    ("replication/lake/merge/slice_commit.py", "_write_files", "replace_files"): "fence",
    ("replication/catalogs/unity.py", "_renew", "delete"): "catalog entry",
    ("replication/receiver/receiver.py", "pass_gaps", "advance_slot"): "slot",
    ("replication/runtime/process_io.py", "leave_result", "replace"): "just made",
    ("replication/source/event_trigger/trigger.py", "keep_installed", "uninstall"): "event trigger",
    ("replication/source/event_trigger/trigger.py", "uninstall", "DROP"): "event trigger",
    ("replication/source/event_trigger/sql.py", "drop_triggers", "DROP"): "event trigger",
    ("replication/source/event_trigger/sql.py", "drop_function", "DROP"): "event trigger",
    ("replication/source/catalog/refused_changes.py", "_leave", "DROP"): _HINT,
    ("replication/source/publication.py", "_drop_again", "drop_publication"): "just made",
    ("replication/source/publication.py", "_take_out", "drop_tables"): "just made",
    ("replication/source/publication.py", "_take_out", "DROP"): _HINT,
    ("replication/source/publication.py", "attempt", "DROP"): _CALLER,
    ("replication/source/slot_creation.py", "_wait_until_gone", "drop_slot"): "just made",
    ("replication/source/slot_creation.py", "close", "DROP_REPLICATION_SLOT"): "just made",
    ("replication/source/slot_creation.py", "create_slot", "drop_unused"): "just made",
    ("replication/source/slot_creation.py", "_has_moved", "advance_slot"): "just made",
    ("replication/source/slot_creation.py", "drop_unused", "drop_slot"): "just made",
    ("replication/source/slot.py", "_use", "advance_slot"): "slot",
    ("replication/source/slot_creation.py", "take_over_slot", "drop_unused"): "just made",
    ("replication/source/publication.py", "_drop", "DROP"): _CALLER,
    ("replication/state/schema.py", "<module>", "DROP"): "state schema",
    ("replication/state/schema.py", "_drop_tables", "DROP"): "state schema",
    ("replication/state/locks.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/state/database.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/state/source_tokens.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/state/source_tokens.py", "forget_tokens", "DROP"): "state schema",
    ("replication/state/source_tokens.py", "forget_tokens", "remove_schema"): "state schema",
    ("replication/state/database.py", "remove_schema", "remove_schema"): "state schema",
    ("replication/state/tables.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/state/recorded_events.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/state/samples.py", "<module>", "DELETE FROM"): "state schema",
    ("replication/storage/probe.py", "_stamp", "delete_files"): "just made",
    ("replication/storage/durable.py", "_set_aside_from", "set_aside_commits"): _CALLER,
    ("replication/storage/durable.py", "set_aside_commits", "set_aside"): _CALLER,
    ("replication/storage/durable.py", "set_aside", "rename"): _CALLER,
    ("replication/storage/filesystem.py", "delete_files", "delete"): _CALLER,
    ("replication/storage/filesystem.py", "delete_files", "delete_file"): _CALLER,
    ("replication/storage/filesystem.py", "delete_tree", "delete_below"): _CALLER,
    ("replication/storage/filesystem.py", "delete_tree", "delete_dir"): _CALLER,
    ("replication/storage/objects.py", "delete_below", "delete_dir"): _CALLER,
    ("replication/storage/objects.py", "_delete", "delete"): _CALLER,
    ("replication/storage/objects.py", "_delete", "delete_file"): _CALLER,
    ("replication/storage/probe.py", "__exit__", "unlink"): "just made",
    ("replication/storage/stores/azure.py", "delete_dir", "delete_dir"): _CALLER,
    ("replication/storage/stores/azure.py", "delete_file", "delete_file"): _CALLER,
    ("replication/storage/probe.py", "check_store", "delete"): "just made",
    ("replication/delta/recovery.py", "set_aside", "set_aside"): _CALLER,
    ("replication/delta/recovery.py", "set_aside", "unlink"): _CALLER,
    ("replication/delta/recovery.py", "set_aside", "set_aside_commits"): _CALLER,
}


def test_every_destructive_call_site_is_listed_with_its_evidence() -> None:
    found = {site for file in PACKAGE.rglob("*.py") for site in _sites(file)}
    assert found == SITES.keys()


def test_evidence_of_every_site_is_explained_in_the_reference() -> None:
    explained = {*_EVIDENCE.findall(PAGE.read_text("utf-8")), _CALLER, _EMPTY, _NOTHING, _ADDS, _HINT}
    assert set(SITES.values()) <= explained


def test_scan_finds_calls_and_statements() -> None:
    file = PACKAGE / "example.py"
    text = (
        "def f(a, b):\n    a.unlink()\n    rmtree(a)\n    a.replace(b)\n    'x'.replace('a', 'b')\n"
        "    run(f'DROP TABLE {a}')\n"
    )
    found = [call for _, _, call in _sites(file, text)]
    assert found == ["unlink", "rmtree", "replace", "DROP"]


def _sites(file: Path, text: str | None = None) -> Iterator[Site]:
    name = file.relative_to(PACKAGE).as_posix()
    yield from (
        (name, function, call)
        for function, call in _within(ast.parse(text or file.read_text("utf-8")), "<module>")
    )


def _within(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(child, ast.Call) and (call := _called(child)):
            yield function, call
        text = child.value if isinstance(child, ast.Constant) else None
        if isinstance(text, str) and (match := _SQL.match(text)):
            yield function, match[1]
        yield from _within(child, inside)


def _called(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Attribute):
        name = call.func.attr
        # Path.replace takes one argument, str.replace two.
        if name == "replace" and len(call.args) == 1 and not call.keywords:
            return name
    elif isinstance(call.func, ast.Name) and call.func.id != "delete":
        name = call.func.id
    else:
        return None
    return name if name in _CALLS else None
