"""The app that publishes a pipeline's changes to a broker.

PGREPL_DSN=… PGREPL_TARGET_URI=… spark-submit publish.py --pipeline FILE.json --publisher NAME
    [--until caught-up|X/X] [--after POSITION]
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.process import leave
from airflow_provider_pgrepl.replication.app.publish import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
