"""The Prometheus metrics of the replication app."""
