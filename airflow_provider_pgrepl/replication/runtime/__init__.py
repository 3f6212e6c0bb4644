"""The process and its host: libraries, logging, memory, compiled functions, Spark's programs."""
