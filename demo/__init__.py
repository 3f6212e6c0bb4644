"""The demo, and the servers for it that tests and benchmarks also use."""
