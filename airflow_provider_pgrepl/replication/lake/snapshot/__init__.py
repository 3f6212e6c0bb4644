"""From COPY to lake tables: ranges, CSV, and the commit that ends a copy."""
