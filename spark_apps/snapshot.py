"""Copy the tables of a pipeline into the lake.

PGREPL_DSN=… spark-submit snapshot.py --pipeline FILE.json [--tables a.b,c.d] [--new-epoch]
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.snapshot import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
