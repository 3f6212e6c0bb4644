"""The lake: writes snapshots and merges, keeps consistent points, and reads and maintains tables."""
