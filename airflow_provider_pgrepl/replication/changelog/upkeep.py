"""Upkeep: commits that change the changelog's list of files, and none of its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import RemoveAction

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import PARTITION, UPKEEP_APP
from airflow_provider_pgrepl.replication.changelog.parts import Part
from airflow_provider_pgrepl.replication.delta.own_commit import commit_token, committing
from airflow_provider_pgrepl.replication.storage import durable, raise_if_away


def removal(path: str, size: int, hour: str) -> RemoveAction:
    """What a commit says of a file that leaves the list; the file itself stays until a vacuum."""
    # Not as a change of data: deltalake refuses every append through a handle that is older than such a
    # commit, and the receiver, which cannot tell that from a fence, would end.
    return RemoveAction(path, False, int(time.time() * 1000), size, {PARTITION: hour})


def replace_files(
    table: DeltaTable,
    removes: Sequence[RemoveAction],
    parts: Sequence[Part] = (),
    *,
    told: Mapping[str, str],
    apps: Sequence[Transaction] = (),
) -> bool:
    """Take files out of the list, and put others into it, in one commit that is on the disk afterwards.

    `told`: the commit's metadata; `apps`: what it carries besides its own app id, by which Delta refuses it
    when another upkeep came first: of two that take the same file out, the second would put its rows in
    twice. Whether the table, which now has what others committed since, is as no other upkeep left it.
    Raises ChangelogError, after which the commit may be there.
    """
    sequence = (table.transaction_version(UPKEEP_APP) or 0) + 1
    try:
        properties = CommitProperties(
            custom_metadata={**told, **commit_token()},
            app_transactions=[Transaction(UPKEEP_APP, sequence), *apps],
        )
        with committing(table, properties):
            table.create_write_transaction(
                [*removes, *(part.add_action(changes_data=False) for part in parts)],
                mode="append",
                schema=table.schema(),
                partition_by=[PARTITION],
                commit_properties=properties,
            )
        durable.flush_newest(table.table_uri)
        table.update_incremental()
    except CommitFailedError as error:
        raise ChangelogError(
            "the changelog's list of files was being changed by another process", "the next run goes on"
        ) from error
    except (DeltaError, OSError) as error:
        raise_if_away("the changelog's list of files cannot be changed", error)
        raise ChangelogError(
            f"the changelog's list of files cannot be changed: {type(error).__name__}"
        ) from error
    return bool(table.transaction_version(UPKEEP_APP) == sequence)
