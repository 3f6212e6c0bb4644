# Sourced by the other scripts: install_packages WHY PACKAGE... (`a|b` means the first of them that apt knows).
# Installs with apt when that needs no password, and otherwise says exactly what to run.

as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null 2>&1 || return 1
    [ "$(id -u)" -eq 0 ] || { command -v sudo && sudo -n true; } >/dev/null 2>&1
}

choose() {
    for package in $(echo "$1" | tr '|' ' '); do
        if apt-cache policy "$package" 2>/dev/null | grep -q 'Candidate: [0-9]'; then
            echo "$package"
            return
        fi
    done
    echo "${1%%|*}"
}

install_packages() {
    why=$1
    shift
    if may_install; then
        as_root apt-get update -qq || true
    fi
    packages=$(for package in "$@"; do choose "$package"; done | tr '\n' ' ')
    if may_install; then
        echo "$why: installing $packages"
        # shellcheck disable=SC2086 # one word a package
        as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends $packages >/dev/null && return 0
    fi
    echo >&2 "$why. Run this, then the same make command again:"
    echo >&2 "    sudo apt-get update && sudo apt-get install -y $packages"
    return 1
}
