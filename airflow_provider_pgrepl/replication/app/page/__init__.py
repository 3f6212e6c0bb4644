"""The page "Replication" in Airflow: decisions about recorded pipelines, without Airflow.

Airflow's API server imports this package. It therefore imports neither pyarrow nor deltalake, which take
seconds and 100 MB.
"""
