"""The app that compares lake tables with the source at one LSN.

PGREPL_DSN=… spark-submit verify.py --pipeline FILE.json [--tables a.b,c.d] [--show-keys] [--repair]

It changes neither the source nor, without --repair, the lake. The exit code is 0 if all tables are equal or
repaired, 1 if one differs, and 2 if none differs but one could not be compared.
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.process import leave
from airflow_provider_pgrepl.replication.app.verify import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
