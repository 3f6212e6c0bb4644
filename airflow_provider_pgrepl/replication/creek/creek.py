"""In creek's place: its environment, its SQL functions, and one process that supervises the apps."""
