"""What pg_catalog says of tables: columns, types, partitions, and how they are published."""
