"""The targets of a publisher: RabbitMQ, NATS and Kafka."""
