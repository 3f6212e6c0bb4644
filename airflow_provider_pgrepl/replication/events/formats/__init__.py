"""What a message says: JSON, Debezium, Avro."""
