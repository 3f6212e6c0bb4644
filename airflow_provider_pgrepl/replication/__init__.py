"""The system: PostgreSQL's logical replication into Delta tables. Never imports Airflow.

Follow a change: `source` (PostgreSQL) → `wire` (bytes → columns) → `receiver` (slot → changelog)
→ `changelog` (the durable log) → `lake` (collapse, merge, consistent points, reading).
"""
