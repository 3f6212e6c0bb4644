"""creek's other half: tables of one database kept in another, by what comes over NATS."""
