#!/bin/sh
# Disks for guests with databases: the programs of PostgreSQL, MariaDB and etcd, with the libraries that the guest
# lacks, and data as they are after the first start. Labels: `databases` and `data`.
#
#   databases.sh POSTGRESQL MARIADB ETCD OUT-DIRECTORY
#
# The first two are directories with unpacked packages, the third is a program. Needs root, for the owners of the data.
set -eu
postgresql=$1
mariadb=$2
etcd=$3
out=$4
here=$(dirname "$(readlink -f "$0")")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
programs=$work/programs
data=$work/data
mkdir -p "$programs/bin" "$programs/lib" "$programs/units" "$data"
mkdir -p "$programs/usr/lib/postgresql/15" "$programs/usr/share/postgresql"
cp -a "$postgresql/usr/lib/postgresql/15/bin" "$programs/usr/lib/postgresql/15/"
mkdir "$programs/usr/lib/postgresql/15/lib"
# Without the compiler of queries, which would be most of it.
find "$postgresql/usr/lib/postgresql/15/lib" -maxdepth 1 -name '*.so' ! -name 'llvmjit*' \
    -exec cp -a {} "$programs/usr/lib/postgresql/15/lib/" \;
cp -a "$postgresql/usr/share/postgresql/15" "$programs/usr/share/postgresql/"
mkdir -p "$programs/usr/share" "$programs/usr/sbin" "$programs/usr/bin"
cp -a "$mariadb/usr/share/mysql" "$programs/usr/share/"
cp -a "$mariadb/usr/sbin/mariadbd" "$programs/usr/sbin/"
cp -a "$mariadb/usr/bin/." "$programs/usr/bin/"
cp "$etcd" "$programs/bin/etcd"
cp "$here/databases-guest.py" "$programs/bin/databases"
chmod 755 "$programs/bin/databases"

# All libraries but those of the C library itself, which belong to the loader of the guest.
for program in "$programs"/usr/lib/postgresql/15/bin/postgres "$programs"/usr/lib/postgresql/15/bin/psql \
    "$programs"/usr/sbin/mariadbd "$programs"/usr/bin/mariadb "$programs"/bin/etcd; do
    LD_LIBRARY_PATH="$postgresql/usr/lib/x86_64-linux-gnu" ldd "$program"
done | grep -o '/[^ )]*' | sort -u | while read -r file; do
    case ${file##*/} in
    libc.so.* | ld-linux* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | libresolv.so.*) ;;
    *.so*) cp -L "$file" "$programs/lib/" ;;
    esac
done

# The machine that builds this need not have these users.
{
    cat /etc/passwd
    echo postgres-guest:x:5432:5432::/:/bin/sh
    echo mysql-guest:x:3306:3306::/:/bin/sh
} > "$work/passwd"
as() {
    user=$1
    shift
    unshare --mount sh -ec 'mount --bind "$0" /etc/passwd; exec "$@"' "$work/passwd" \
        setpriv --reuid "$user" --regid "$user" --clear-groups -- env -i PATH=/usr/bin:/bin HOME=/ \
        LD_LIBRARY_PATH="$programs/lib" "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
}
for one in pg:5432 mysql:3306 etcd:2379; do
    mkdir "$data/${one%:*}"
    chown "${one#*:}:${one#*:}" "$data/${one%:*}"
    chmod 700 "$data/${one%:*}"
done
as 5432 "$programs/usr/lib/postgresql/15/bin/initdb" -D "$data/pg" -k -U postgres --locale=C --no-sync \
    --auth-local=peer --auth-host=reject --wal-segsize=1 --no-instructions
as 3306 "$programs/usr/bin/mariadb-install-db" --no-defaults --skip-test-db --skip-name-resolve \
    --auth-root-authentication-method=socket --auth-root-socket-user=mysql \
    --basedir="$programs/usr" --datadir="$data/mysql"

unit() {
    cat > "$programs/units/$1.service" <<UNIT
[Unit]
RequiresMountsFor=/data /opt/databases
[Service]
User=$2
RuntimeDirectory=$3
Environment=LD_LIBRARY_PATH=/opt/databases/lib
# The first user land of the tests leaves it open to everybody, and then no socket in it is believed.
ExecStartPre=+/bin/chmod 755 /run
ExecStart=$4
TimeoutStartSec=300
[Install]
WantedBy=multi-user.target
UNIT
}
unit postgresql postgres postgresql "/opt/databases/usr/lib/postgresql/15/bin/postgres -D /data/pg \
-c listen_addresses= -c unix_socket_directories=/run/postgresql -c shared_buffers=8MB -c max_connections=20 \
-c max_wal_size=32MB -c min_wal_size=4MB -c dynamic_shared_memory_type=mmap"
unit mariadb mysql mysqld "/opt/databases/usr/sbin/mariadbd --no-defaults --basedir=/opt/databases/usr \
--lc-messages-dir=/opt/databases/usr/share/mysql --datadir=/data/mysql --socket=/run/mysqld/mysqld.sock \
--skip-networking --skip-name-resolve --log-bin=log --server-id=7 --gtid-strict-mode=ON \
--innodb-buffer-pool-size=16M --innodb-log-file-size=8M --innodb-use-native-aio=OFF \
--key-buffer-size=1M --aria-pagecache-buffer-size=1M"
unit etcd etcd etcd "/opt/databases/bin/etcd --data-dir /data/etcd --listen-client-urls http://127.0.0.1:2379 \
--advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 \
--initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster default=http://127.0.0.1:2380"

mke2fs -q -t ext4 -m 0 -L databases -d "$programs" "$out/programs.raw" 400M
mke2fs -q -t ext4 -m 0 -L data -d "$data" "$out/data.raw" 768M
