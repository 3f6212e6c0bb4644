# Jars from Maven Central by setup/NAME.xml, checked by setup/NAME.sha256. Sourced; usage: fetch_jars NAME TITLE FOLDER
. setup/apt.sh

# A local repository of its own: a half-filled ~/.m2 makes Maven and Spark's Ivy fail in odd ways. It stays until all
# jars are there, so that a run that was interrupted is continued.
maven_repository() {
    repository=$PWD/.maven/$1
    mkdir -p "$repository"
}

run_maven() {
    mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never -Dmaven.repo.local="$repository" "$@"
}

fetch_jars() {
    sums=$(realpath "setup/$1.sha256")
    if has_jars "$3"; then return 0; fi
    sh setup/maven.sh
    maven_repository "$1"
    echo "fetching $2"
    rm -rf "$repository/jars"
    run_maven --file "setup/$1.xml" -DoutputDirectory="$repository/jars" "dependency:${4:-copy-dependencies}"
    # All of them came; those of another version go.
    mkdir -p "$3"
    rm -f "$3"/*.jar
    mv "$repository"/jars/* "$3"
    if ! has_jars "$3"; then
        echo >&2 "The jars in $3 are not those of setup/$1.sha256; delete the folder and try again."
        exit 1
    fi
    rm -rf "$repository"
}

has_jars() {
    (cd "$1" 2>/dev/null && sha256sum --check --status "$sums" 2>/dev/null)
}
