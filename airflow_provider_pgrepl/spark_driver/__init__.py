"""Applications on this host: started detached, found again, followed, stopped. Knows no Airflow."""
