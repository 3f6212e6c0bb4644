"""Events as Debezium's connector for PostgreSQL writes them as JSON, for sinks that were made for it."""
