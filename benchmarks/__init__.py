"""The benchmarks of the product, with peers measured in the same run: `python -m benchmarks [figure …]`."""
