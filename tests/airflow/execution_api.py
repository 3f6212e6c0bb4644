"""Airflow's Execution API, built where processes that run tasks are forked: each would need 1.5 s for it."""

from airflow.sdk.execution_time.supervisor import in_process_api_server

in_process_api_server().app  # noqa: B018 - kept by Airflow when first read
