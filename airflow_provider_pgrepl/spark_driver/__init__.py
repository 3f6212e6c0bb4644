"""Start, find, follow and stop detached apps on this host. Does not import Airflow."""
