"""Copy the tables of a pipeline into the lake.

PGREPL_DSN=… spark-submit snapshot.py --pipeline FILE.json [--tables a.b,c.d | --add [a.b,c.d] | --new-epoch
    | --take-over SLOT]

Without an option it takes what is not in the lake, or is errored; --tables resnapshots tables; --add takes
those that the pipeline file does not hold, or without names what matches its patterns now; --new-epoch
begins a new history with all of them; --take-over begins where another program's slot stands.
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.process import leave
from airflow_provider_pgrepl.replication.app.snapshot import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
