#!/bin/sh
# Run docker-compose.yaml in podman (tests/rehearsal). What that needs is fetched once: podman and debootstrap by apt, Docker Compose and a
# minimal Debian from Debian's mirror into .rehearsal. Skipped with one line where it cannot run. No image registry is asked for anything.
set -eu
cd "$(dirname "$0")/.."
. setup/apt.sh
packages="podman buildah runc netavark aardvark-dns iptables catatonit debootstrap debian-archive-keyring"
target=$PWD/.rehearsal

skip() {
    echo "rehearsal skipped: $1"
    exit 0
}

there() {
    for command in podman runc iptables catatonit debootstrap; do
        PATH=$PATH:/usr/sbin command -v "$command" >/dev/null || return 1
    done
}

there || may_install || skip "podman is missing; run: sudo apt-get update && sudo apt-get install -y $packages"
[ "$(id -u)" -eq 0 ] || skip "it makes root file systems and networks; run: sudo make rehearsal"
unshare --mount --net true 2>/dev/null || skip "this sandbox allows no mounts and networks; run on a virtual machine: sudo make rehearsal"
# shellcheck disable=SC2086 # one word a package
there || install_packages "The rehearsal needs podman" $packages

# From Debian trixie, wherever this runs: the one of bookworm and podman-compose drop `configs` with content. One file, which needs libc alone.
if [ ! -x "$target/docker-compose" ]; then
    mkdir -p "$target"
    fetching=$(mktemp -d "$target/XXXXXX")
    trap 'rm -rf "$fetching"' EXIT
    mkdir -p "$fetching/lists/partial" "$fetching/cache/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$fetching/sources.list"
    apt_trixie() {
        apt-get -qq -o Dir::Etc::sourcelist="$fetching/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$fetching/lists" \
            -o Dir::Cache="$fetching/cache" -o APT::Sandbox::User=root "$@"
    }
    apt_trixie update
    (cd "$fetching" && apt_trixie download docker-compose && dpkg-deb -x docker-compose_*.deb unpacked)
    mv "$fetching/unpacked/usr/libexec/docker/cli-plugins/docker-compose" "$target/docker-compose"
    rm -rf "$fetching"
fi
if [ ! -e "$target/context/debian.tar" ]; then
    echo "making a minimal Debian for the rehearsal's images, once; this takes some minutes"
    rm -rf --one-file-system "$target/debian"
    PATH=$PATH:/usr/sbin debootstrap --variant=minbase --include=ca-certificates bookworm "$target/debian" >"$target/debootstrap.log"
    mkdir -p "$target/context"
    tar -C "$target/debian" -cf "$target/context/debian.partial" .
    rm -rf --one-file-system "$target/debian"
    mv "$target/context/debian.partial" "$target/context/debian.tar"
fi
exec .venv/bin/python -m tests.rehearsal
