"""Copies source tables into lake tables: ranges, COPY's CSV, and the commit that ends a copy."""
