#!/bin/sh
# Check that Maven is there; install it where apt may. Before anything that runs Maven is started side by side.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh
mvn --version >/dev/null 2>&1 || install_packages "Maven is missing; it fetches the jars" maven
