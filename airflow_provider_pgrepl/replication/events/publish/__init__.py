"""Publishing change events: from the changelog to a broker, at least once and in order, and where it is."""
