"""The snapshot program: an epoch begins, tables are taken into one that runs."""
