"""The COPY of tables at one exported snapshot, which a separate session holds."""
