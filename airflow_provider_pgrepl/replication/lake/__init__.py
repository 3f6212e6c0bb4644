"""The lake: snapshots and merges written, consistent points kept, tables read and maintained."""
