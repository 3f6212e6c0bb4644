"""The formats of a message: JSON, Debezium and Avro."""
