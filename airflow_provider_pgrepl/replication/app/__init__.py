"""The programs: snapshot, replicate, status. Each puts the rooms together; its exit code says how it went."""
