"""The schema `_pgrepl` and its migrations. A released version is never edited; changes are added as a new
version."""

from __future__ import annotations

import psycopg2.errors

from airflow_provider_pgrepl.errors import PrivilegeError, SourceConnectionError, StateError, one_line
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import STATE_SCHEMA
from airflow_provider_pgrepl.replication.source.connection import Connection, acting_role_hint, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors


def _renamed_settings(*names: tuple[str, str]) -> str:
    """Return SQL that renames settings in the recorded configurations of pipelines and tables."""
    pipelines, tables = "config::text", "config"
    for old, new in names:
        pipelines, tables = (
            f"pg_catalog.replace({one}, '\"{old}\":', '\"{new}\":')" for one in (pipelines, tables)
        )
    return (
        f"UPDATE _pgrepl.pipelines SET config = ({pipelines})::jsonb;"
        f" UPDATE _pgrepl.tables SET config = {tables}"
    )


# Follow pg_auth_members: pg_has_role() counts a superuser as a member of every role. pg_depend has no entries
# for objects that every database has, and this package's own tables depend on nothing else.
_STRANGERS = """
WITH RECURSIVE ours (oid) AS (
    SELECT oid FROM pg_catalog.pg_roles WHERE rolname = current_user
    UNION
    SELECT m.roleid FROM ours JOIN pg_catalog.pg_auth_members m ON m.member = ours.oid
), trusted (oid) AS (
    SELECT oid FROM ours UNION SELECT oid FROM pg_catalog.pg_roles WHERE rolsuper
), held AS (
    SELECT c.oid, c.relname, c.relkind, c.relowner, c.relrowsecurity FROM pg_catalog.pg_class c
    WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = '_pgrepl')
), found (text, owner, owned) AS (
    SELECT 'the schema', n.nspowner, 'SCHEMA _pgrepl' FROM pg_catalog.pg_namespace n
        WHERE n.nspname = '_pgrepl'
    UNION ALL
    SELECT pg_catalog.format('relation %I', relname), relowner,
        CASE WHEN relkind = 'r' THEN pg_catalog.format('TABLE _pgrepl.%I', relname) END
    FROM held WHERE relkind <> 'i'
        -- The server keeps the sequence of an identity column with the owner of its table.
        AND NOT (relkind = 'S' AND EXISTS (SELECT FROM pg_catalog.pg_depend d
            JOIN held t ON t.oid = d.refobjid
            WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = held.oid
                AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype = 'i'))
    UNION ALL
    SELECT pg_catalog.format('function %I', p.proname), p.proowner, NULL FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = '_pgrepl'
    UNION ALL
    SELECT pg_catalog.format('the function of trigger %I on %I', t.tgname, held.relname), p.proowner, NULL
    FROM held JOIN pg_catalog.pg_trigger t ON t.tgrelid = held.oid AND NOT t.tgisinternal
        JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
), odd (text, cure) AS (
    SELECT pg_catalog.format('%s belongs to role %I', text, pg_catalog.pg_get_userbyid(owner)),
        'ALTER ' || owned || pg_catalog.format(' OWNER TO %I', current_user)
    FROM found WHERE owner NOT IN (SELECT oid FROM trusted)
    UNION ALL
    SELECT pg_catalog.format('table %I has row-level security', relname), NULL FROM held WHERE relrowsecurity
    UNION ALL
    SELECT pg_catalog.format('table %I has rule %I', held.relname, r.rulename), NULL
    FROM held JOIN pg_catalog.pg_rewrite r ON r.ev_class = held.oid WHERE held.relkind IN ('r', 'p')
    UNION ALL
    SELECT pg_catalog.format('table %I depends on %s', held.relname,
        pg_catalog.pg_describe_object(d.refclassid, d.refobjid, 0)), NULL
    FROM held JOIN LATERAL (
        SELECT 'pg_catalog.pg_class'::regclass::oid, held.oid
        UNION ALL SELECT 'pg_catalog.pg_attrdef'::regclass::oid, a.oid FROM pg_catalog.pg_attrdef a
            WHERE a.adrelid = held.oid
        UNION ALL SELECT 'pg_catalog.pg_constraint'::regclass::oid, k.oid FROM pg_catalog.pg_constraint k
            WHERE k.conrelid = held.oid
        UNION ALL SELECT 'pg_catalog.pg_class'::regclass::oid, i.indexrelid FROM pg_catalog.pg_index i
            WHERE i.indrelid = held.oid
        UNION ALL SELECT 'pg_catalog.pg_statistic_ext'::regclass::oid, s.oid
            FROM pg_catalog.pg_statistic_ext s WHERE s.stxrelid = held.oid
    ) AS part (classid, objid) ON true
        JOIN pg_catalog.pg_depend d ON d.classid = part.classid AND d.objid = part.objid
        AND d.refclassid = ANY (ARRAY['pg_catalog.pg_proc', 'pg_catalog.pg_type', 'pg_catalog.pg_operator',
            'pg_catalog.pg_opclass']::regclass[])
    WHERE held.relkind IN ('r', 'p')
)
SELECT DISTINCT text, cure FROM odd ORDER BY 1
"""
SCHEMA = STATE_SCHEMA
_VERSIONS: tuple[str, ...] = (
    """
    CREATE TABLE _pgrepl.pipelines (
        name text PRIMARY KEY,
        system_identifier text NOT NULL,
        slot text NOT NULL,
        publication text NOT NULL,
        slot_owned boolean NOT NULL,
        publication_owned boolean NOT NULL,
        lake text NOT NULL CONSTRAINT pipelines_lake UNIQUE,
        config jsonb NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pipelines_slot UNIQUE (system_identifier, slot)
    );
    CREATE UNIQUE INDEX pipelines_publication ON _pgrepl.pipelines (system_identifier, publication)
        WHERE publication_owned;
    CREATE TABLE _pgrepl.tables (
        pipeline text NOT NULL REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        schema_name text NOT NULL,
        table_name text NOT NULL,
        state text NOT NULL,
        reason text NOT NULL DEFAULT '',
        hint text NOT NULL DEFAULT '',
        lsn pg_lsn,
        since timestamptz NOT NULL DEFAULT now(),
        relation text,
        position_lsn pg_lsn,
        snapshot_at timestamptz,
        rows_copied bigint,
        PRIMARY KEY (pipeline, schema_name, table_name)
    );
    CREATE TABLE _pgrepl.progress (
        pipeline text PRIMARY KEY REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        received_lsn pg_lsn NOT NULL DEFAULT '0/0',
        durable_lsn pg_lsn NOT NULL DEFAULT '0/0',
        told_lsn pg_lsn NOT NULL DEFAULT '0/0',
        applied_lsn pg_lsn NOT NULL DEFAULT '0/0',
        applied_commit_ts timestamptz,
        changes_per_s double precision NOT NULL DEFAULT 0,
        holder text NOT NULL DEFAULT '',
        updated_at timestamptz NOT NULL DEFAULT now()
    );
    """,
    """
    ALTER TABLE _pgrepl.tables
        ADD error text NOT NULL DEFAULT '',
        ADD membership text NOT NULL DEFAULT 'configured'
            CONSTRAINT tables_membership CHECK (membership IN ('configured', 'added', 'removed')),
        ADD config text;
    ALTER TABLE _pgrepl.progress ADD idle_at timestamptz;
    """,
    # Until this version only the hint named the remedy. Any hint of these errors that says more leads to the
    # same remedy.
    """
    ALTER TABLE _pgrepl.tables ADD remedy text;
    UPDATE _pgrepl.tables SET remedy = CASE
        WHEN error = 'PrivilegeError' AND hint LIKE '%then retry the table%' THEN 'grant'
        WHEN error = 'DriftError' AND hint LIKE '%then retry the table%' THEN 'undo'
        WHEN error = 'DriftError' AND hint <> '' THEN 'anew' END
    WHERE state = 'errored';
    """,
    """
    CREATE TABLE _pgrepl.locks (
        pipeline text NOT NULL,
        purpose text NOT NULL,
        pid int NOT NULL,
        started timestamptz NOT NULL,
        holder text NOT NULL,
        PRIMARY KEY (pipeline, purpose)
    );
    """,
    "ALTER TABLE _pgrepl.progress ADD table_bytes jsonb NOT NULL DEFAULT '{}'",
    "ALTER TABLE _pgrepl.progress RENAME told_lsn TO confirmed_lsn",
    "UPDATE _pgrepl.tables SET remedy = 'resnapshot' WHERE remedy = 'anew'",
    "ALTER TABLE _pgrepl.progress ADD table_merges jsonb NOT NULL DEFAULT '{}'",
    "ALTER TABLE _pgrepl.tables ADD trace text NOT NULL DEFAULT ''",
    # Earlier records lack these values. They are recorded when an app next finds that all other values agree.
    """
    ALTER TABLE _pgrepl.pipelines
        ADD id uuid NOT NULL DEFAULT pg_catalog.gen_random_uuid(),
        ADD database text NOT NULL DEFAULT '',
        ADD database_oid bigint NOT NULL DEFAULT 0,
        ADD lake_id text NOT NULL DEFAULT '';
    """,
    """
    CREATE TABLE _pgrepl.selected_relations (
        pipeline text NOT NULL REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        relation_id bigint NOT NULL,
        relation_version bigint NOT NULL,
        relation text NOT NULL,
        PRIMARY KEY (pipeline, relation_id, relation_version)
    );
    """,
    # A publication's name is unique in its database only, unlike a slot's.
    """
    DROP INDEX _pgrepl.pipelines_publication;
    CREATE UNIQUE INDEX pipelines_publication
        ON _pgrepl.pipelines (system_identifier, database_oid, publication) WHERE publication_owned;
    """,
    # Events have no foreign key: they stay when their pipeline is torn down.
    """
    CREATE TABLE _pgrepl.events (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        pipeline text NOT NULL,
        time timestamptz NOT NULL DEFAULT now(),
        schema_name text,
        table_name text,
        kind text NOT NULL,
        from_state text,
        to_state text,
        actor text NOT NULL,
        error text NOT NULL DEFAULT '',
        reason text NOT NULL DEFAULT '',
        hint text NOT NULL DEFAULT '',
        lsn pg_lsn,
        details jsonb NOT NULL DEFAULT '{}',
        CONSTRAINT events_table CHECK ((schema_name IS NULL) = (table_name IS NULL))
    );
    CREATE INDEX events_of_pipeline ON _pgrepl.events (pipeline, id);
    CREATE INDEX events_of_table ON _pgrepl.events (pipeline, schema_name, table_name, id);
    CREATE TABLE _pgrepl.samples (
        pipeline text NOT NULL REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        time timestamptz NOT NULL DEFAULT now(),
        received_lsn pg_lsn,
        durable_lsn pg_lsn,
        confirmed_lsn pg_lsn,
        applied_lsn pg_lsn,
        wal_lsn pg_lsn,
        lag_seconds double precision,
        lag_bytes bigint,
        changes_per_s double precision,
        bytes_per_s double precision,
        wal_retained_bytes bigint,
        wal_limit_bytes bigint,
        slot_active boolean,
        memory_bytes bigint,
        PRIMARY KEY (pipeline, time)
    );
    CREATE TABLE _pgrepl.table_samples (
        pipeline text NOT NULL REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        time timestamptz NOT NULL DEFAULT now(),
        schema_name text NOT NULL,
        table_name text NOT NULL,
        state text NOT NULL,
        position_lsn pg_lsn,
        lag_seconds double precision,
        live_bytes bigint,
        kept_bytes bigint,
        merge_seconds double precision,
        PRIMARY KEY (pipeline, time, schema_name, table_name)
    );
    CREATE INDEX table_samples_of_table
        ON _pgrepl.table_samples (pipeline, schema_name, table_name, time);
    """,
    "ALTER TABLE _pgrepl.tables ADD verified_through pg_lsn, ADD verified_at timestamptz",
    _renamed_settings(
        ("freshness_s", "merge_interval_s"),
        ("write_amplification", "max_write_amplification"),
        ("points_every_s", "consistent_point_interval_s"),
        ("points_keep_h", "consistent_point_retention_h"),
        ("points_keep_all_h", "consistent_point_keep_all_h"),
        ("points_thin_min", "consistent_point_thinning_min"),
        ("points_bytes", "consistent_point_bytes"),
        ("publish_keep_h", "publish_retention_h"),
    ),
    "ALTER TABLE _pgrepl.tables ADD copying jsonb",
    "ALTER TABLE _pgrepl.progress ADD complete_at timestamptz",
    """
    CREATE TABLE _pgrepl.publishers (
        pipeline text NOT NULL REFERENCES _pgrepl.pipelines ON DELETE CASCADE,
        name text NOT NULL,
        target text NOT NULL,
        tables jsonb,
        published_lsn pg_lsn NOT NULL,
        stopped jsonb NOT NULL,
        holder text NOT NULL,
        updated_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (pipeline, name)
    )
    """,
)
_MIGRATIONS_TABLE = """
SELECT 1 FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = 'migrations'
"""
LOCK_WAIT_MS = 10_000
_ATTEMPTS = 3
_MADE_BY_ANOTHER = (
    psycopg2.errors.UniqueViolation,
    psycopg2.errors.DuplicateSchema,
    psycopg2.errors.DuplicateTable,
)
# A lock on one of the tables needs a privilege on it, unlike an advisory lock.
_IN_THE_WAY = """
SELECT DISTINCT pg_catalog.format('role %s from %s (database pid %s, %s)', coalesce(a.usename, 'unknown'),
    coalesce(pg_catalog.host(a.client_addr), 'no address'), a.pid,
    coalesce(nullif(a.application_name, ''), a.backend_type))
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
    LEFT JOIN pg_catalog.pg_class c ON c.oid = l.relation
WHERE l.pid <> pg_catalog.pg_backend_pid() AND l.granted AND l.locktype = 'relation'
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND (c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = '_pgrepl')
        OR (c.relname = 'pg_namespace' AND l.mode = 'RowExclusiveLock'))
ORDER BY 1
"""


def check_ownership(connection: Connection) -> None:
    """Raise StateError if the schema exists and belongs to, or holds objects of, untrusted roles.

    Call it before anything in the schema is read: a view or a default would run its owner's code with the
    rights of this session's role.
    """
    with source_errors("looking whose schema _pgrepl is"):
        found = rows(connection, _STRANGERS)
        if not found:
            return
        role, database = row(
            connection,
            "SELECT pg_catalog.quote_ident(current_user), pg_catalog.quote_ident(current_database())",
        )
    odd = "; ".join(one_line(text) for text, _ in found)
    # Suggest new owners only if they fix everything: any other object in the schema would then run as this
    # role.
    cures = [] if any(cure is None for _, cure in found) else [one_line(cure) for _, cure in found]
    if_yours = f", or run as a superuser: {'; '.join(cures)}" if cures else ""
    raise StateError(
        f"schema _pgrepl in database {database} is not, or not only, this program's: {odd}",
        f"it must belong to role {role}, to one that this is a member of, or to a superuser, with"
        f" nothing of others in it. If it is yours, connect as its owner{if_yours}. If another program"
        " created the schema, set another database for the state: state_conn_id, or PGREPL_STATE_DSN. Do not"
        " drop the schema while it has a table _pgrepl.pipelines: that is the record of every pipeline here",
    )


def migrate(connection: Connection) -> None:
    """Migrate the schema to this program's version. Writes nothing if the schema has that version.

    Concurrent calls wait for each other. Raises PrivilegeError, which names the missing right; StateError if
    the schema is newer than this program or the database is read-only; SourceConnectionError, which names the
    blocking sessions, if a lock is not granted within 10 s.
    """
    for _ in range(_ATTEMPTS):
        if _version(connection) == len(_VERSIONS) or _has_migrated(connection):
            return
    raise SourceConnectionError("schema _pgrepl is being set up by others", "try again when they are done")


def _has_migrated(connection: Connection) -> bool:
    """Apply the missing versions and return True, or return False if another session created the same objects
    at the same time."""
    doing = "setting up schema _pgrepl"
    with source_errors(doing):
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
                _apply(connection)
                cursor.execute("COMMIT")
        except _MADE_BY_ANOTHER:
            _roll_back(connection)
            return False
        except psycopg2.errors.LockNotAvailable:
            _roll_back(connection)
            raise _in_the_way(connection, doing) from None
        except psycopg2.errors.InsufficientPrivilege:
            _roll_back(connection)
            raise _missing_right(connection) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            _roll_back(connection)
            raise StateError(
                "schema _pgrepl cannot be set up: the database is read-only",
                "give another database for it: state_conn_id, or PGREPL_STATE_DSN",
            ) from None
        except BaseException:
            _roll_back(connection)
            raise
    return True


def _in_the_way(connection: Connection, doing: str) -> SourceConnectionError:
    who = "; ".join(one_line(text) for (text,) in rows(connection, _IN_THE_WAY))
    return SourceConnectionError(
        f"{doing}: a lock was not granted within {LOCK_WAIT_MS // 1000} s, because of"
        f" {who or 'a session that has just released it'}",
        "run the command again when that session has ended its transaction",
    )


def is_set_up(connection: Connection) -> bool:
    """Return True if the schema exists, in any version. Raises StateError for a newer one."""
    return _version(connection) > 0


def remove_schema(connection: Connection) -> bool:
    """Drop the schema if it records no pipeline, and return True if it no longer exists.

    The schema is kept if it holds objects of others or belongs to another role. Raises SourceConnectionError
    if a lock is not granted within 10 s.
    """
    if not _exists(connection):
        return True
    with source_errors("removing schema _pgrepl"):
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(f"SET LOCAL lock_timeout = {LOCK_WAIT_MS}")
                is_empty = _drop_tables(connection)
                cursor.execute("COMMIT")
        except psycopg2.errors.LockNotAvailable:
            _roll_back(connection)
            raise _in_the_way(connection, "removing schema _pgrepl") from None
        except (psycopg2.errors.InsufficientPrivilege, psycopg2.errors.DependentObjectsStillExist):
            _roll_back(connection)
            return False
        except BaseException:
            _roll_back(connection)
            raise
    return is_empty


def _drop_tables(connection: Connection) -> bool:
    with connection.cursor() as cursor:
        if _version(connection):
            cursor.execute("LOCK TABLE _pgrepl.pipelines IN ACCESS EXCLUSIVE MODE")
            if rows(connection, "SELECT 1 FROM _pgrepl.pipelines LIMIT 1"):
                return False
            cursor.execute(
                "DROP TABLE IF EXISTS _pgrepl.locks, _pgrepl.selected_relations, _pgrepl.events,"
                " _pgrepl.samples, _pgrepl.table_samples, _pgrepl.publishers"
            )
            cursor.execute(
                "DROP TABLE _pgrepl.progress, _pgrepl.tables, _pgrepl.pipelines, _pgrepl.migrations"
            )
        cursor.execute("DROP SCHEMA _pgrepl RESTRICT")
    return True


def _apply(connection: Connection) -> None:
    """Create and migrate the schema in the current transaction. Concurrent calls wait for the creation of the
    schema, the creation of the table, or the lock on it."""
    with connection.cursor() as cursor:
        if not _exists(connection):
            cursor.execute("CREATE SCHEMA _pgrepl")
        check_ownership(connection)  # the schema may have been created since the connection was opened
        if rows(connection, _MIGRATIONS_TABLE, (SCHEMA,)):
            cursor.execute("LOCK TABLE _pgrepl.migrations IN SHARE ROW EXCLUSIVE MODE")
        version = _version(connection)
        if version == 0:
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS _pgrepl.migrations"
                " (version int PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())"
            )
        for number, statements in enumerate(_VERSIONS[version:], version + 1):
            cursor.execute(statements)
            cursor.execute("INSERT INTO _pgrepl.migrations (version) VALUES (%s)", (number,))


def _version(connection: Connection) -> int:
    """Return the version of the schema, 0 if there is no schema. Raises StateError for a newer version."""
    with source_errors("reading schema _pgrepl"):
        # Query the catalog: to_regclass() may use a cached result from before the lock, when the schema was
        # missing.
        if not rows(connection, _MIGRATIONS_TABLE, (SCHEMA,)):
            return 0
        found = row(connection, "SELECT coalesce(max(version), 0) FROM _pgrepl.migrations")[0]
    if found > len(_VERSIONS):
        raise StateError(
            f"schema _pgrepl has version {found}, and this program knows {len(_VERSIONS)} at most",
            "update airflow-provider-pgrepl here to the version that runs elsewhere",
        )
    return int(found)


def _exists(connection: Connection) -> bool:
    return bool(rows(connection, "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = %s", (SCHEMA,)))


def _roll_back(connection: Connection) -> None:
    if not connection.closed:
        connection.cursor().execute("ROLLBACK")


def _missing_right(connection: Connection) -> PrivilegeError:
    role, database = row(connection, "SELECT current_user::text, pg_catalog.current_database()::text")
    acting = acting_role_hint(connection)
    if _exists(connection):
        return PrivilegeError(
            f"role {role} may not set up the tables of schema _pgrepl in database {database}",
            f"{acting}GRANT USAGE, CREATE ON SCHEMA _pgrepl TO {quote_identifier(role)}, or let the schema's"
            " owner run this once",
        )
    return PrivilegeError(
        f"role {role} may not create schema _pgrepl in database {database}: it lacks CREATE on the database",
        f"{acting}GRANT CREATE ON DATABASE {quote_identifier(database)} TO {quote_identifier(role)}, or give"
        " another database: state_conn_id, or PGREPL_STATE_DSN",
    )
