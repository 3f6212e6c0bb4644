# Everything a reader of README runs. `make help` lists it.
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Each process would compile all that it imports: 12 s of CPU time for a process of the tests.
unexport PYTHONDONTWRITEBYTECODE
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
# Options of the tests, as in: make test PYTEST_ARGS="-k handover"
PYTEST_ARGS ?=
WORKERS ?= 4
# With COVERAGE=1 `make test`, and then `make test-rest`, measure which lines and branches run: at least 93 % of them, and 94 %.
COVERAGE ?=
# With TIMES=1 they measure fixtures and CPU time for `make test-times`.
TIMES ?=
# Options of `make soak`
HOURS ?= 8
# Options of `make test-seeds`
SEEDS ?= 100
FIRST_SEED ?= 1

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  %-12s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: warm-up ## Make the virtual environment .venv (with uv, from PyPI when it is not on PATH)

.PHONY: venv
venv:
	@sh setup/venv.sh

# Some 30 seconds of a processor, once: no first start has to wait for them.
.PHONY: warm-up
warm-up: venv
	@$(PYTHON) -m airflow_provider_pgrepl warm-up >/dev/null

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

.PHONY: maven
maven: java
	@sh setup/maven.sh

.PHONY: versitygw
versitygw: venv ## Build a server that speaks S3 into .versitygw, once
	@sh setup/versitygw.sh
	@rm -rf .go

.PHONY: stores
stores: venv ## That, servers that speak Google's and Azure's storage into .gcs_server and .azurite, and Toxiproxy into .toxiproxy, once
	@sh setup/versitygw.sh
	@sh setup/gcs_server.sh
	@sh setup/toxiproxy.sh
	@sh setup/azurite.sh
	@rm -rf .go

.PHONY: oldest
oldest: venv
	@sh setup/majors.sh oldest

.PHONY: majors
majors: venv ## Fetch PostgreSQL 14 to 17 into .postgresql, once
	@sh setup/majors.sh

# Where apt may not install it, the end of the run names the tests that need it.
.PHONY: chromium
chromium:
	@sh setup/chromium.sh || true

# The tests in `make test-rest` start it often.
.PHONY: class-archive
class-archive: venv kafka
	@$(PYTHON) -m tests.support.class_archive

.PHONY: downloads
downloads: venv maven
	@$(MAKE) -j 4 --output-sync=target majors kafka debezium registry s3a gs abfs chromium

.PHONY: fetch
fetch: downloads stores ## Fetch and build all that `make test-all` needs

.PHONY: demo
demo: setup java jars $(if $(filter s3,$(LAKE)),versitygw) ## PostgreSQL, traffic, Airflow, Spark and the lake, all on this machine (EXIT=1 ends by itself)
	@exec $(PYTHON) -m demo $(if $(filter-out 0 no false,$(EXIT)),--exit) --rate $(RATE) --scale $(SCALE) --duration $(DURATION) --events "$(EVENTS)" --lake "$(LAKE)" \
		--pg-port $(PG_PORT) --airflow-port $(AIRFLOW_PORT)

.PHONY: check
check: venv ## Lint, formatting, types and the direction of imports
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy dags/*.py
	.venv/bin/mypy spark_apps/*.py setup/*.py
	.venv/bin/lint-imports

# Where apt could install all of Debian's servers, no test may be skipped; elsewhere the end of the run says which were.
PYTEST = if sh setup/servers.sh; then export PGREPL_REQUIRE_DEBIAN=1; fi; \
	exec $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0 $(if $(TIMES),--times) $(PYTEST_ARGS)

.PHONY: test
# Their tests wait for servers more than they compute.
mechanisms test-fast rest: WORKERS = 5
test: venv java ## The checks, and a test of each mechanism: about 11 minutes on two cores
	@$(MAKE) -j 4 -k checked mechanisms

# What fails is shown at once, and the tests go on.
.PHONY: checked mechanisms
checked: venv
	@mkdir -p .pytest_cache; $(MAKE) check >.pytest_cache/check.log 2>&1 && echo "the checks passed" || { cat .pytest_cache/check.log; exit 1; }

# All workers would compile each file of the tests at once. What is wrong with a file is shown by them.
.PHONY: collected
collected: venv
	@$(PYTHON) -m pytest --collect-only --quiet --tier test >/dev/null 2>&1 || true

# Here they are installed beside the rest; what is missing is reported by PYTEST.
.PHONY: servers
servers:
	@sh setup/servers.sh >/dev/null 2>&1 || true

mechanisms: setup jars oldest servers collected
	@export PGREPL_TEST_PG_MAJORS="14 18"; $(PYTEST) --tier test $(if $(COVERAGE),--cov --cov-report= --cov-fail-under=93)

.PHONY: test-fast
test-fast: setup ## Quick tests that need no Spark, no broker and no store: 3 minutes
	@export PGREPL_TEST_PG_MAJORS="18"; $(PYTEST) --tier fast

.PHONY: test-rest
test-rest: downloads class-archive setup jars ## What `make test` leaves out: every major, Kafka, object stores, clusters, more examples
	@mkdir -p .pytest_cache; rm -f .pytest_cache/built
	@$(MAKE) -j 2 -k built rest

# Three minutes of a compiler. The tests that need these servers wait for them, the others do not.
.PHONY: built rest
built: venv
	@$(MAKE) stores >.pytest_cache/stores.log 2>&1 || { cat .pytest_cache/stores.log; failed=1; }; touch .pytest_cache/built; exit $${failed:-0}
rest:
	@export PGREPL_BUILDING=$(CURDIR)/.pytest_cache/built PGREPL_TEST_PG_MAJORS="14 15 16 17 18" HYPOTHESIS_PROFILE=thorough; \
		$(PYTEST) --tier rest $(if $(COVERAGE),--cov --cov-append --cov-report=)

# Downloads take minutes of a slow network, and seconds of a processor: they need not be waited for. What fails
# is fetched again by `make test-rest`.
.PHONY: test-and-fetch
test-and-fetch: venv java maven
	@$(MAKE) -j 4 --output-sync=target setup jars oldest servers
	@mkdir -p .pytest_cache; nice $(MAKE) downloads class-archive >.pytest_cache/downloads.log 2>&1 & $(MAKE) test; code=$$?; wait; exit $$code

.PHONY: test-all
test-all: ## `make test`, `make test-rest`, then `make rehearsal`: 50 minutes
	@$(MAKE) test-and-fetch
	@$(MAKE) test-rest
	@$(MAKE) rehearsal

# Not in .ci/run: on two cores it takes 9 minutes, the first time 15, and then it fetches about 2 GB.
.PHONY: rehearsal
rehearsal: setup ## docker-compose.yaml in podman, from the build to equal tables after crashes; skipped where podman cannot be
	@sh setup/rehearsal.sh

.PHONY: test-loaded
test-loaded: ## `make test` beside four busy loops
	@pids=; trap 'kill $$pids' EXIT; for n in 1 2 3 4; do timeout 5400 sh -c 'while :; do :; done' & pids="$$pids $$!"; done; $(MAKE) test

.PHONY: test-times
test-times: ## `make test-all`, measured; writes the tables of CONTRIBUTING.md
	@$(MAKE) test TIMES=1
	@$(MAKE) test-rest TIMES=1
	@$(PYTHON) -m tests.times

.PHONY: mutations
mutations: java setup jars oldest ## Check that `make test` fails for each fault of tests/mutations.toml
	$(PYTHON) -m tests.mutate $(MUTATIONS)

.PHONY: soak
soak: setup java jars $(if $(filter s3,$(LAKE)),versitygw) ## Random traffic, DDL and faults for HOURS=8, then `verify` (LAKE=s3 EVENTS=nats); prints a report
	@sh setup/toxiproxy.sh
	@rm -rf .go
	@$(if $(filter nats,$(EVENTS)),sh setup/nats.sh)
	@$(PYTHON) -m tests.soak --hours $(HOURS) $(if $(LAKE),--lake $(LAKE)) $(if $(EVENTS),--events $(EVENTS))

.PHONY: test-seeds
test-seeds: setup java jars ## Random tables, types, transactions and failures under many seeds (SEEDS=100 FIRST_SEED=1)
	PGREPL_SEEDS=$(SEEDS) PGREPL_FIRST_SEED=$(FIRST_SEED) $(PYTHON) -m pytest tests/spark/test_random_pipeline.py tests/integration/test_random_drift.py \
		tests/fault/test_drift_killed.py $(PYTEST_ARGS)

.PHONY: bench
bench: setup java jars kafka debezium versitygw ## Measure speed against peers in the same run; writes docs/benchmarks.md
	$(PYTHON) -m benchmarks

.PHONY: docs
docs: venv ## Build the site of the documents into .docs/site; a warning, such as of a lost link, is an error
	@sh setup/docs.sh .docs

.PHONY: audit
audit: venv ## Look for known vulnerabilities in the locked dependencies, at osv.dev
	@. setup/uv.sh; "$$uv" audit --preview-features audit-command --frozen --no-dev

.PHONY: release
release: venv audit ## Build wheel, source, SBOM and checksums of this commit into dist
	@sh setup/release.sh

.PHONY: clean
clean: ## Remove what demo and tests left; keeps .venv, .jars, .kafka, .debezium, .registry, .versitygw, .gcs_server, .azurite, .toxiproxy, .postgresql and .rehearsal
	rm -rf .demo .docs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist spark-warehouse
	find . -name __pycache__ -not -path './.venv/*' -not -path './.rehearsal/*' -prune -exec rm -rf {} +
