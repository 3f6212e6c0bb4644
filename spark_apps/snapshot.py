"""The app that copies the tables of a pipeline into the lake.

PGREPL_DSN=… spark-submit snapshot.py --pipeline FILE.json [--tables a.b,c.d | --add [a.b,c.d] | --new-epoch
    | --resync [a.b,c.d] | --adopt [a.b,c.d] | --take-over SLOT]

Without an option, it copies tables that are not in the lake or are errored. --tables resnapshots tables.
--add adds tables that the pipeline file does not list, or without names all tables that match its patterns
now.
--new-epoch begins a new epoch, which copies all tables. --resync begins one whose tables are compared with
the source, and repaired; with names it does that to these tables, in the present epoch. --adopt compares
lake tables that another program has written, and makes them the pipeline's. --take-over begins at the
position of another program's slot.
"""

from __future__ import annotations

import sys

from airflow_provider_pgrepl.replication.app.process import leave
from airflow_provider_pgrepl.replication.app.snapshot import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
