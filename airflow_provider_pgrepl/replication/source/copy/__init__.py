"""COPY of tables at one exported snapshot, which a session of its own keeps."""
