"""The Prometheus metrics of the replication app and of publishers."""
