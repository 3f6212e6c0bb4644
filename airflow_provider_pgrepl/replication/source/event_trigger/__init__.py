"""DDL in the stream: the event trigger, what its messages carry, and who may have sent them."""
