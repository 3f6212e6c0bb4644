"""Change events: the changelog's changes for others than the lake, one by one and in the source's order."""
