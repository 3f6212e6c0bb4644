"""The command line `pgrepl`."""
