"""The comparison of lake tables with the source at one LSN."""
