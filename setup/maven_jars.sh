# Jars from Maven Central by setup/NAME.xml, checked by setup/NAME.sha256. Sourced; usage: fetch_jars NAME TITLE FOLDER
. setup/apt.sh

fetch_jars() {
    sums=$(realpath "setup/$1.sha256")
    if has_jars "$3"; then return 0; fi
    mvn --version >/dev/null 2>&1 || install_packages "Maven is missing; it fetches $2" maven
    # A local repository of its own: a half-filled ~/.m2 makes Maven fail in odd ways.
    repository=$(mktemp -d)
    trap 'rm -rf "$repository"' EXIT
    echo "fetching $2"
    mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never --file "setup/$1.xml" -Dmaven.repo.local="$repository" \
        -DoutputDirectory="$repository/jars" dependency:copy-dependencies
    # All of them came; those of another version go.
    mkdir -p "$3"
    rm -f "$3"/*.jar
    mv "$repository"/jars/* "$3"
    if ! has_jars "$3"; then
        echo >&2 "The jars in $3 are not those of setup/$1.sha256; delete the folder and try again."
        exit 1
    fi
}

has_jars() {
    (cd "$1" 2>/dev/null && sha256sum --check --status "$sums" 2>/dev/null)
}
