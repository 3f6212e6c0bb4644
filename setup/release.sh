#!/bin/sh
# Build what a release consists of into dist/: wheel, source, list of components (CycloneDX) and SHA-256 sums.
set -eu
cd "$(dirname "$0")/.."
. setup/uv.sh
changes=$(git status --porcelain)
if [ -n "$changes" ]; then
    echo "commit your changes first: a release is built from a commit" >&2
    exit 1
fi
if [ -e dist ]; then
    echo "dist/ is there, of an earlier build: move or remove it first" >&2
    exit 1
fi
# All files in the archives have the time of the commit, so that anyone can build the same bytes and compare.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
trap 'rm -rf dist' EXIT # only a whole build may stay
"$uv" build --quiet --python .venv/bin/python --no-build-isolation --out-dir dist # with the locked hatchling
"$uv" export --quiet --preview-features sbom-export --format cyclonedx1.5 --frozen --no-dev --all-extras \
    --output-file dist/airflow_provider_pgrepl.cdx.json >/dev/null
grep -q SHA-256 dist/airflow_provider_pgrepl.cdx.json || { echo "this uv writes no hashes: use 0.13.8" >&2; exit 1; }
rm -f dist/.gitignore
(cd dist && sha256sum -- * >SHA256SUMS)
trap - EXIT
cat dist/SHA256SUMS
