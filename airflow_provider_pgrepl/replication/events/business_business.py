"""Business events: what is published of changes that stand for something else than a row."""
