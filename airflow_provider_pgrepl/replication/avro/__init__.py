"""Changes in Avro, under schemas of a registry."""
