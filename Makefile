# Everything a reader of README runs. `make help` lists it.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
PYTHON := .venv/bin/python

# Options of `make demo`, as in: make demo EXIT=1 RATE=500
EXIT ?=
RATE ?= 200
SCALE ?= 10
DURATION ?= 60
EVENTS ?=
LAKE ?=
PG_PORT ?= 15432
AIRFLOW_PORT ?= 8180
# Options of `make test`, as in: make test PYTEST_ARGS="-k handover"
PYTEST_ARGS ?=
WORKERS ?= 3
# Options of `make soak`
SEEDS ?= 100
FIRST_SEED ?= 1

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: ## Make the virtual environment .venv (with uv, from PyPI when it is not on PATH)
	@sh setup/venv.sh

.PHONY: java
java: ## Check for Java 17 or newer; install it where apt may
	@sh setup/java.sh

.PHONY: jars
jars: ## Fetch the seven Delta jars into .jars, once
	@sh setup/jars.sh

.PHONY: s3a
s3a: java ## Fetch what Spark needs to read lakes on S3 into .jars/s3a, once
	@sh setup/connector.sh s3a

.PHONY: gs
gs: java ## The same for lakes on Google Cloud Storage, into .jars/gs
	@sh setup/connector.sh gs

.PHONY: abfs
abfs: java ## The same for lakes on Azure, into .jars/abfs
	@sh setup/connector.sh abfs

.PHONY: debezium
debezium: java ## Fetch Debezium's engine into .debezium, once
	@sh setup/debezium.sh

.PHONY: registry
registry: java ## Fetch a schema registry into .registry, once
	@sh setup/registry.sh

.PHONY: kafka
kafka: java ## Fetch Kafka's broker into .kafka, once
	@sh setup/kafka.sh

.PHONY: versitygw
versitygw: setup ## Build a server that speaks S3 into .versitygw, once
	@sh setup/versitygw.sh

.PHONY: stores
stores: versitygw ## That, and servers that speak Google's and Azure's storage into .gcs_server and .azurite, once
	@sh setup/gcs_server.sh
	@sh setup/azurite.sh

.PHONY: majors
majors: setup ## Fetch PostgreSQL 14 to 17 into .postgresql, once
	@sh setup/majors.sh

.PHONY: demo
demo: setup java jars $(if $(filter s3,$(LAKE)),versitygw) ## PostgreSQL, traffic, Airflow, Spark and the lake, all on this machine (EXIT=1 ends by itself)
	@exec $(PYTHON) -m demo $(if $(filter-out 0 no false,$(EXIT)),--exit) --rate $(RATE) --scale $(SCALE) --duration $(DURATION) --events "$(EVENTS)" --lake "$(LAKE)" \
		--pg-port $(PG_PORT) --airflow-port $(AIRFLOW_PORT)

.PHONY: check
check: setup ## Lint, formatting, types and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy dags/*.py
	.venv/bin/mypy spark_apps/*.py setup/*.py
	.venv/bin/lint-imports

.PHONY: test
test: setup java jars s3a gs abfs majors kafka debezium registry stores check ## Everything: the checks, then all tests
	PGREPL_TEST_PG_MAJORS="14 15 16 17 18" $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
		--max-worker-restart 0 $(if $(PYTEST_ARGS),,--cov --cov-report=) $(PYTEST_ARGS)

.PHONY: soak
soak: setup java jars ## Random tables, types, transactions and failures under many seeds (SEEDS=100 FIRST_SEED=1)
	PGREPL_SEEDS=$(SEEDS) PGREPL_FIRST_SEED=$(FIRST_SEED) $(PYTHON) -m pytest tests/spark/test_random_pipeline.py tests/integration/test_random_drift.py \
		tests/fault/test_drift_killed.py $(PYTEST_ARGS)

.PHONY: bench
bench: setup java jars kafka debezium versitygw ## Measure speed against peers in the same run; writes docs/benchmarks.md
	$(PYTHON) -m benchmarks

.PHONY: clean
clean: ## Remove what demo and tests left; keeps .venv, .jars, .kafka, .debezium, .registry, .versitygw, .gcs_server, .azurite and .postgresql
	rm -rf .demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist spark-warehouse
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
