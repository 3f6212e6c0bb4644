"""Brokers: RabbitMQ, NATS, Kafka."""
