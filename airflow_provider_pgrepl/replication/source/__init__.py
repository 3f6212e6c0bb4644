"""The source database: connections, catalog, publication, slot, snapshot and stream."""
