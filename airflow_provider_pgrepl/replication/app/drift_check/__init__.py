"""The catalog looked at without a row, and migrations tried."""
