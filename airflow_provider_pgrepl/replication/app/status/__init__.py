"""How a pipeline is doing: read, summed up, written out."""
