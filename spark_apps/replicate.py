"""The app that receives changes and applies them to the lake tables.

PGREPL_DSN=… spark-submit replicate.py --pipeline FILE.json [--until caught-up|X/X]
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.process import leave
from airflow_provider_pgrepl.replication.app.replicate import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
