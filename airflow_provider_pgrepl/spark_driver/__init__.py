"""Start, find, follow and stop detached applications on this host. Does not import Airflow."""
