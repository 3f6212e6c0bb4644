"""The extra links of a task that runs an app: status, lake and documentation."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink, conf

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import read_pipeline

DOCUMENTS_PREFIX = "/pgrepl"
PAGE_PREFIX = "/pgrepl-page"
LAKE_PAGE = "lake"
_PAGE = "docs/reference/operators.md"


class StatusLink(BaseOperatorLink):
    """A link to the task's XComs: `status`, updated every minute, and the return value."""

    name = "Status"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        mapped = "" if (ti_key.map_index or -1) < 0 else f"/mapped/{ti_key.map_index}"
        task = f"/dags/{ti_key.dag_id}/runs/{quote(ti_key.run_id)}/tasks/{ti_key.task_id}{mapped}"
        return _own(f"{task}/xcom")


class LakeLink(BaseOperatorLink):
    """A link to a page with the path of the lake as the worker sees it. Airflow shows no links to files."""

    name = "Lake"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        try:
            lake = read_pipeline(operator.pipeline).lake_root
        except ConfigError:
            return ""
        return _own(f"{DOCUMENTS_PREFIX}/{LAKE_PAGE}?{urlencode({'path': lake})}")


class DocumentationLink(BaseOperatorLink):
    """A link to the operators' reference page of the installed version."""

    name = "Documentation"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        return _own(f"{DOCUMENTS_PREFIX}/{_PAGE}")


def _own(path: str) -> str:
    """Return the URL of a path of this Airflow."""
    base = str(conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}{path}"
