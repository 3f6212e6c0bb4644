"""The definitions of tables in pg_catalog: columns, types, partitions, and membership in a publication."""
