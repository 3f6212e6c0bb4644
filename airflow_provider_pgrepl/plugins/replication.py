"""The FastAPI application of the page "Replication". It translates requests and decides nothing.

The API server alone imports this module. Every route needs a login and the permission to read DAGs. All
routes only read: actions are DAG runs, which the page requests from Airflow's public API.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

from airflow.api_fastapi.core_api.security import requires_access_dag
from airflow.configuration import conf
from airflow.models.connection import Connection
from airflow.secrets.environment_variables import EnvironmentVariablesBackend
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, Response
from sqlalchemy import select

from airflow_provider_pgrepl.errors import PgReplError, SourceConnectionError
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook, dsn_of
from airflow_provider_pgrepl.replication.app.page import documents
from airflow_provider_pgrepl.replication.app.page.documents import (
    DETAIL_TIMEOUT_S,
    LIMIT_S,
    Databases,
    Document,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName

_FOLDER = Path(__file__).parent / "page"
_ENVIRONMENT = "AIRFLOW_CONN_"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_app() -> FastAPI:
    """Return the application with all routes of the page."""
    app = FastAPI(
        title="PostgreSQL replication",
        dependencies=[Depends(requires_access_dag(method="GET")), Depends(_add_headers)],
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.js", "page.js", "text/javascript"),
        ("/page.css", "page.css", "text/css"),
    ):
        app.add_api_route(path, partial(_file, name, kind), methods=["GET"], name=name)
    databases: Databases[Document] = Databases()
    _add_questions(app, databases)
    return app


def _add_questions(app: FastAPI, databases: Databases[Document]) -> None:
    @app.get("/api/databases")
    def list_databases() -> Document:
        return {"databases": list(state_conn_ids())}

    @app.get("/api/pipelines")
    def list_pipelines(database: str) -> Document:
        must_have_state = bool(_configured())
        read = partial(documents.read_pipelines, must_have_state=must_have_state)
        return _asked(databases, database, "pipelines", read, LIMIT_S)

    @app.get("/api/tables")
    def list_tables(database: str, pipeline: str) -> Document:
        question = ("tables", pipeline)
        return _asked(
            databases, database, question, lambda dsn: documents.read_tables(dsn, pipeline), DETAIL_TIMEOUT_S
        )

    @app.get("/api/table")
    def show_table(database: str, pipeline: str, schema: str, name: str) -> Document:
        table = TableName(schema, name)
        question = ("table", pipeline, table)
        return _asked(
            databases,
            database,
            question,
            lambda dsn: documents.read_table(dsn, pipeline, table),
            DETAIL_TIMEOUT_S,
        )


def state_conn_ids() -> dict[str, None]:
    """Return the connections of state databases, in order: those of `[pgrepl] state_conn_ids`, or all of type
    pgrepl in Airflow's database and environment."""
    if named := _configured():
        return named
    statement = select(Connection.conn_id).where(Connection.conn_type == PgReplicationHook.conn_type)
    with create_session() as session:
        stored = list(session.scalars(statement))
    names = (name.removeprefix(_ENVIRONMENT).lower() for name in os.environ if name.startswith(_ENVIRONMENT))
    given = [name for name in names if _is_of_type(name)]
    return dict.fromkeys(sorted({*stored, *given}))


def _configured() -> dict[str, None]:
    named = str(conf.get("pgrepl", "state_conn_ids", fallback="") or "")
    return dict.fromkeys(name.strip() for name in named.split(",") if name.strip())


def _is_of_type(conn_id: str) -> bool:
    try:
        kind = EnvironmentVariablesBackend().get_connection(conn_id).conn_type
    except Exception:  # noqa: BLE001 - a connection of another program may be malformed
        return False
    return bool(kind == PgReplicationHook.conn_type)


def _asked(
    databases: Databases[Document],
    database: str,
    question: Hashable,
    read: Callable[[str], Document],
    limit_s: float,
) -> Document:
    """Return the answer of a state database, or its error as a document."""
    if database not in state_conn_ids():
        return _error(SourceConnectionError(f"connection {database} is not one of a state database"))
    try:
        # The secrets backend that has the connection may be as slow as the database.
        found = databases.ask(database, question, lambda: read(_dsn(database)), limit_s)
    except PgReplError as error:
        return _error(error)
    except Exception as error:  # noqa: BLE001 - shown as the state of this database, without its message
        return _error(SourceConnectionError(f"connection {database} cannot be used: {type(error).__name__}"))
    return found


def _dsn(conn_id: str) -> str:
    return dsn_of(Connection.get_connection_from_secrets(conn_id))


def _error(error: PgReplError) -> Document:
    return {"error": {"error": type(error).__name__, "reason": error.message, "hint": error.hint}}


def _file(name: str, kind: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=f"{kind}; charset=utf-8", headers=_HEADERS)


def _add_headers(response: Response) -> None:
    response.headers.update(_HEADERS)
