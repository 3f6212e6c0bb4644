"""The declarations for Airflow's provider manager and connection form."""

from __future__ import annotations

_SSL_MODES = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


def _text(label: str, description: str, **schema: object) -> dict[str, object]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}


_CONNECTION_FIELDS: dict[str, object] = {
    "sslmode": {
        "label": "SSL mode",
        "description": "verify-full is the one that is safe against a man in the middle",
        "schema": {"type": "string", "enum": _SSL_MODES, "default": "prefer"},
    },
    "sslrootcert": _text("Root certificate", "Path on every worker, or system"),
    "sslcert": _text("Client certificate", "Path on every worker"),
    "sslkey": _text("Client key", "Path on every worker; readable by its owner alone"),
    "sslpassword": _text("Client key's password", "Only for an encrypted key", format="password"),
    "options": _text("Options", "Command-line options for the server, as -c work_mem=64MB"),
    "connect_timeout": {
        "label": "Connect timeout",
        "description": "Seconds",
        "schema": {"type": ["integer", "null"], "minimum": 1},
    },
    "target_session_attrs": {
        "label": "Server wanted",
        "description": "With several hosts: which one",
        "schema": {
            "type": "string",
            "enum": ["any", "read-write", "read-only", "primary", "standby", "prefer-standby"],
            "default": "any",
        },
    },
}

PROVIDER_INFO: dict[str, object] = {
    "package-name": "airflow-provider-pgrepl",
    "name": "PostgreSQL replication",
    "description": "PostgreSQL into Delta lake tables and kept there, exactly once, in whole transactions.",
    "integrations": [
        {
            "integration-name": "PostgreSQL replication",
            "external-doc-url": "https://www.postgresql.org/docs/current/logical-replication.html",
            "tags": ["service"],
        }
    ],
    "hooks": [
        {
            "integration-name": "PostgreSQL replication",
            "python-modules": ["airflow_provider_pgrepl.hooks.replication"],
        }
    ],
    "operators": [
        {
            "integration-name": "PostgreSQL replication",
            "python-modules": [
                "airflow_provider_pgrepl.operators.publish",
                "airflow_provider_pgrepl.operators.snapshot",
                "airflow_provider_pgrepl.operators.replication",
                "airflow_provider_pgrepl.operators.resnapshot",
                "airflow_provider_pgrepl.operators.verify",
                "airflow_provider_pgrepl.operators.maintenance",
                "airflow_provider_pgrepl.operators.tables",
                "airflow_provider_pgrepl.operators.teardown",
            ],
        }
    ],
    "sensors": [
        {
            "integration-name": "PostgreSQL replication",
            "python-modules": ["airflow_provider_pgrepl.sensors.drift"],
        }
    ],
    "triggers": [
        {
            "integration-name": "PostgreSQL replication",
            "python-modules": ["airflow_provider_pgrepl.triggers.drift"],
        }
    ],
    "extra-links": [
        "airflow_provider_pgrepl.links.task.StatusLink",
        "airflow_provider_pgrepl.links.task.LakeLink",
        "airflow_provider_pgrepl.links.task.DocumentationLink",
    ],
    "config": {
        "pgrepl": {
            "description": "PostgreSQL replication",
            "options": {
                "run_folder": {
                    "description": (
                        "Folder for what applications on this worker need while they run: pipeline, log, exit"
                        " code. It belongs to the user of the workers alone, and outlasts a restart."
                    ),
                    "version_added": "0.1.0",
                    "type": "string",
                    "example": "/var/lib/airflow/pgrepl",
                    "default": "{AIRFLOW_HOME}/pgrepl",
                }
            },
        }
    },
    "connection-types": [
        {
            "connection-type": "pgrepl",
            "hook-name": "PostgreSQL replication",
            "hook-class-name": "airflow_provider_pgrepl.hooks.replication.PgReplicationHook",
            "ui-field-behaviour": {
                "hidden-fields": [],
                "relabeling": {"schema": "Database", "login": "User"},
                "placeholders": {
                    "host": "the server itself, not a pooler",
                    "port": "5432",
                    "login": "a role with REPLICATION",
                },
            },
            "conn-fields": _CONNECTION_FIELDS,
        }
    ],
}
