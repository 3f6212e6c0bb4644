"""The doctor: a diagnosis of everything that a pipeline needs, and the steps to prepare its source."""
