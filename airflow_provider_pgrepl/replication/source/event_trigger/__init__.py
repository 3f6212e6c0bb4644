"""DDL in the stream: the event triggers, the content of their messages, and the proof of their origin."""
