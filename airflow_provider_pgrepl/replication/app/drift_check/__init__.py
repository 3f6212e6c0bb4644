"""The check of the catalog for drift, which reads no row, and the trial of a migration."""
