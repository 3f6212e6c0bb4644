"""How fast the product is, beside peers in the same run: `python -m benchmarks [figure …]`."""
