#!/bin/sh
# Build the site of the documents below the folder of the first argument. Warnings are errors.
set -eu
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
# Importing the operators reads Airflow's settings, and creates them where they are missing.
export AIRFLOW_HOME="$folder/airflow" AIRFLOW__LOGGING__LOGGING_LEVEL=WARNING
.venv/bin/sphinx-build --quiet --fail-on-warning --keep-going -d "$folder/doctrees" -c docs_site . "$folder/site"
echo "built $folder/site/docs/README.html"
