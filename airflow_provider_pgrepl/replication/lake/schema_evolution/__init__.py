"""Lake tables follow their relations: which one holds for which change, and how rows are translated."""
