"""The steps that prepare a source for logical replication, by provider, as a script of SQL and comments.

From the providers' documentation; docs/how-to/prepare-the-source.md names the pages.
"""

from __future__ import annotations

from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

# No password: a script that is run unread would create a login that everybody knows.
_THEN = "-- Give it a password, in psql with: \\password replicator"
_ROLE = f"CREATE ROLE replicator LOGIN REPLICATION;\n{_THEN}"
_RDS_ROLE = f"CREATE ROLE replicator LOGIN;\n{_THEN}\nGRANT rds_replication TO replicator;"
_RESTART = "-- Restart the server."

_STEPS: dict[str, tuple[tuple[str, ...], str]] = {
    "self-hosted": (
        (
            "ALTER SYSTEM SET wal_level = 'logical';",
            "-- More than the WAL of your longest planned stop. Without it, a stopped pipeline can fill the",
            "-- disk. It is the limit of all programs' slots: a slot beyond it loses changes.",
            "-- ALTER SYSTEM SET max_slot_wal_keep_size = '50GB';",
            f"{_RESTART} Let the role in through pg_hba.conf, by a line for the database itself.",
        ),
        _ROLE,
    ),
    "rds": (
        (
            "-- In a parameter group of your own (the default group cannot be changed) set",
            "-- rds.logical_replication = 1, attach it to the instance, and reboot. This sets wal_level.",
            "-- aws rds modify-db-parameter-group --db-parameter-group-name GROUP --parameters \\",
            "--   ParameterName=rds.logical_replication,ParameterValue=1,ApplyMethod=pending-reboot",
            "-- aws rds reboot-db-instance --db-instance-identifier INSTANCE",
            "-- Connect to the instance itself, not to RDS Proxy.",
        ),
        _RDS_ROLE,
    ),
    "aurora": (
        (
            "-- In a cluster parameter group of your own set rds.logical_replication = 1, attach it to the",
            "-- cluster, and reboot the writer. This sets wal_level.",
            "-- aws rds modify-db-cluster-parameter-group --db-cluster-parameter-group-name GROUP \\",
            "--   --parameters \\",
            "--   ParameterName=rds.logical_replication,ParameterValue=1,ApplyMethod=pending-reboot",
            "-- aws rds reboot-db-instance --db-instance-identifier WRITER",
            "-- Connect to the writer's endpoint, not to RDS Proxy.",
        ),
        _RDS_ROLE,
    ),
    "cloud-sql": (
        (
            "-- Set the flag cloudsql.logical_decoding. The instance restarts. The command replaces all",
            "-- flags: name the flags that are set already, too.",
            "-- gcloud sql instances patch INSTANCE --database-flags=cloudsql.logical_decoding=on",
            "-- As postgres:",
        ),
        _ROLE,
    ),
    "azure": (
        (
            "-- Set the server parameters, then restart:",
            "-- az postgres flexible-server parameter set --resource-group GROUP --server-name SERVER \\",
            "--   --name wal_level --value logical",
            "-- az postgres flexible-server parameter set --resource-group GROUP --server-name SERVER \\",
            "--   --name max_worker_processes --value 16",
            "-- az postgres flexible-server restart --resource-group GROUP --name SERVER",
            "-- Connect to port 5432: port 6432 is PgBouncer. As the administrator:",
        ),
        _ROLE,
    ),
    "supabase": (
        (
            "-- wal_level is logical already. Use the direct connection (db.PROJECT.supabase.co:5432), not",
            "-- the pooler Supavisor. It has an IPv6 address; IPv4 is an add-on.",
            "-- supabase --experimental --project-ref PROJECT postgres-config update \\",
            "--   --config max_slot_wal_keep_size=4GB",
            "-- As postgres:",
        ),
        _ROLE,
    ),
    "neon": (
        (
            "-- In the console: Settings, Logical Replication, Enable. All computes restart. It cannot be",
            "-- undone.",
            "-- Use the direct connection: the host name without -pooler.",
            "-- Neon drops a slot that was inactive for about 40 hours, and all slots when a branch is",
            "-- restored. Every table must be copied again then: do not stop the pipeline for longer.",
        ),
        _ROLE,
    ),
}
PROVIDERS = tuple(_STEPS)


def source_script(pipeline: Pipeline, provider: str) -> str:
    """Return the steps for a provider, and the rights of the role, as a script.

    Statements are SQL. Steps outside of SQL are comments.
    """
    steps, role = _STEPS[provider]
    lines = [
        f"-- Prepares a source ({provider}) for pipeline {pipeline.name}. Read each line before you run it.",
        "",
        *steps,
        role,
        "",
        "-- Rights on the tables, by their owner, in the database of the tables:",
        *_rights(pipeline),
        "",
        "-- Then check: pgrepl doctor FILE.json",
    ]
    return "\n".join(lines)


def _rights(pipeline: Pipeline) -> list[str]:
    lines = ["GRANT CREATE ON DATABASE DATABASE_NAME TO replicator;"]
    for text in pipeline.tables:
        if text.endswith(".*"):
            schema = quote_identifier(TableName.parse(f"{text[:-1]}any").schema)
            on = f"ALL TABLES IN SCHEMA {schema}"
        else:
            table = TableName.parse(text)
            schema, on = quote_identifier(table.schema), table.sql
        lines += [
            f"GRANT USAGE ON SCHEMA {schema} TO replicator;",
            f"GRANT SELECT ON {on} TO replicator;",
        ]
        if pipeline.sequences:
            lines.append(f"GRANT SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO replicator;")
    if pipeline.publication_mode == "create":
        lines.append("GRANT OWNER_OF_TABLES TO replicator; -- only an owner may publish a table")
    return list(dict.fromkeys(lines))
