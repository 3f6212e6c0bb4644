"""Replication slots: made, looked at, moved on, dropped, and who reads them."""
