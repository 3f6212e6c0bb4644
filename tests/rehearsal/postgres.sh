# The part of the postgres image's entry point that docker-compose.yaml needs.
set -eu
if [ "$(id -u)" -eq 0 ]; then
    install --directory --owner postgres --mode 0700 "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --init-groups bash "$0" "$@"
fi
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb --username postgres --pwfile <(printf '%s' "$POSTGRES_PASSWORD") --auth-local trust --auth-host scram-sha-256 \
        --encoding UTF8 --locale C.UTF-8
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
    echo "unix_socket_directories = '/var/run/postgresql'" >>"$PGDATA/postgresql.conf"
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    # On the socket only: the health check, which asks over TCP, fails until all is there.
    pg_ctl start --wait --options "-c listen_addresses=''"
    createdb --username postgres "$POSTGRES_DB"
    for file in /docker-entrypoint-initdb.d/*; do . "$file"; done
    pg_ctl stop --wait --mode fast
fi
exec "$@"
