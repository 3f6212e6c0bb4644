"""The Prometheus metrics of the replication application."""
