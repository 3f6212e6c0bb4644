"""Change events: the changes of the changelog, one by one and in commit order, for consumers of all kinds."""
