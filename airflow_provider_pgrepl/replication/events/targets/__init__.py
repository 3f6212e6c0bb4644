"""The targets of a publisher. Their registry, without their clients, is `settings/targets.py`."""
