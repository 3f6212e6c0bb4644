"""Whose schema `_pgrepl` is: who may make schemas could have been first, and have code of his run by us."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import StateError, one_line
from airflow_provider_pgrepl.replication.source.connection import Connection, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# A superuser is a member of every role, as far as pg_has_role() is concerned. What is asked is who was made
# one. What every database has is not in pg_depend: our own tables depend on nothing else.
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


def check_ownership(connection: Connection) -> None:
    """Raises StateError when the schema is there, and somebody else's, or has something of somebody else's.

    To be asked before anything in it is read: a view, or a default, would run its owner's code as us.
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
    # Whatever else is in it would then run as this role.
    cures = [] if any(cure is None for _, cure in found) else [one_line(cure) for _, cure in found]
    if_yours = f", or run as a superuser: {'; '.join(cures)}" if cures else ""
    raise StateError(
        f"schema _pgrepl in database {database} is not, or not only, this program's: {odd}",
        f"it must belong to role {role}, to one that this is a member of, or to a superuser, with nothing of"
        f" others in it. If it is yours, connect as its owner{if_yours}; if somebody else has made it, drop"
        " it, or give another database for it: state_conn_id, or PGREPL_STATE_DSN",
    )
