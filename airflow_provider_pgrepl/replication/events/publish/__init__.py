"""Publishing of change events from the changelog to a broker, at least once and in order."""
