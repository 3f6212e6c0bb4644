"""What is said of a table whose merges wait for a budget."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.state.progress import TableMerges


def told(merges: TableMerges) -> str:
    """For people: which budget, and why."""
    if merges.waits_for == "points_bytes":
        return "its merges replace more of the table than points_bytes has room for"
    share = merges.written / max(merges.changed, 1)
    return (
        f"in the last hour it wrote {share:.0f} bytes to the lake for each byte of change, which is more than"
        " write_amplification allows"
    )
