#!/usr/bin/python3
"""Runs in guests whose databases are on disks that databases.sh makes.

    databases set-up KIND …  users, units and mounts; starts these servers
    databases load KIND OUT  writes numbers for ever; each that was acknowledged, and after how many seconds, goes to OUT
    databases check KIND [POSITION]
                             what is there: prints a JSON document
"""

import http.client
import json
import os
import shutil
import subprocess
import sys
import time

HOME = "/opt/databases"
USERS = {"postgresql": ("postgres", 5432), "mariadb": ("mysql", 3306), "etcd": ("etcd", 2379)}
PSQL = [f"{HOME}/usr/lib/postgresql/15/bin/psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-h", "/run/postgresql"]
MYSQL = [f"{HOME}/usr/bin/mariadb", "--no-defaults", "-N", "-B", "--unbuffered", "-S", "/run/mysqld/mysqld.sock"]
PSQL += ["-U", "postgres", "postgres"]
MYSQL += ["-u", "mysql"]
TABLES = {
    "postgresql": "CREATE TABLE IF NOT EXISTS one (n bigint PRIMARY KEY, filler text);"
    "CREATE TABLE IF NOT EXISTS two (n bigint PRIMARY KEY, filler text);",
    "mariadb": "CREATE DATABASE IF NOT EXISTS numbers;"
    "CREATE TABLE IF NOT EXISTS numbers.one (n bigint PRIMARY KEY, filler text) ENGINE = InnoDB;"
    "CREATE TABLE IF NOT EXISTS numbers.two LIKE numbers.one;",
}
INSERT = {
    "postgresql": "BEGIN; INSERT INTO one VALUES ({n}, repeat('x', 200)); "
    "INSERT INTO two SELECT * FROM one WHERE n = {n}; COMMIT; SELECT {n};\n",
    "mariadb": "BEGIN; INSERT INTO numbers.one VALUES ({n}, repeat('x', 200)); "
    "INSERT INTO numbers.two SELECT * FROM numbers.one WHERE n = {n}; COMMIT; SELECT {n};\n",
}


def command(kind):
    """The client of a database, as the database's user."""
    user = USERS[kind][0]
    words = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    return [*words, "env", f"LD_LIBRARY_PATH={HOME}/lib", *(PSQL if kind == "postgresql" else MYSQL)]


def ask(kind, query):
    """Rows of an answer."""
    done = subprocess.run(command(kind), input=query, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{kind}: {query}: {done.stderr}")
    return done.stdout.split("\n")[:-1]


def etcd(path, body):
    """What etcd answers."""
    connection = http.client.HTTPConnection("127.0.0.1", 2379, timeout=120)
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        sys.exit(f"etcd: {path}: {text}")
    return json.loads(text)


def base64(text):
    import base64 as encoder

    return encoder.b64encode(text.encode()).decode()


def write_line(path, line):
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, line.encode())
    os.close(out)


def wait_up(kind):
    """Waits until the server answers."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if kind == "etcd":
            try:
                etcd("/v3/maintenance/status", {})
                return
            except OSError as error:
                problem = error
        else:
            asked = subprocess.run(command(kind), input="SELECT 1;", capture_output=True, text=True)
            if asked.returncode == 0:
                return
            problem = asked.stderr
        time.sleep(0.5)
    words = ["journalctl", "--no-pager", "--lines", "15", "--unit", kind]
    log = subprocess.run(words, capture_output=True, text=True).stdout
    sys.exit(f"{kind} does not answer: {problem}\n{log}")


def set_up(*kinds):
    for user, number in (USERS[kind] for kind in kinds):
        subprocess.run(["useradd", "--user-group", "--no-create-home", "--uid", str(number), user], check=True)
    for name in os.listdir(f"{HOME}/units"):
        shutil.copy(f"{HOME}/units/{name}", "/etc/systemd/system/")
    with open("/etc/fstab", "a") as table:
        table.write(f"LABEL=databases {HOME} ext4 ro,nofail,x-systemd.device-timeout=300 0 0\n")
        table.write("LABEL=data /data ext4 nofail,x-systemd.device-timeout=300 0 0\n")
    os.makedirs("/data", exist_ok=True)
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "enable", "--quiet", "--now", *kinds], check=True)
    for kind in kinds:
        wait_up(kind)
        if kind in TABLES:
            ask(kind, TABLES[kind])


def put(name, number):
    return {"requestPut": {"key": base64(name), "value": base64(str(number))}}


def load(kind, out):
    write = None
    if kind == "etcd":

        def write(number):
            etcd("/v3/kv/txn", {"success": [put(f"one/{number:09}", number), put("newest", number)]})

    else:
        client = subprocess.Popen(command(kind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def write(number):
            client.stdin.write(INSERT[kind].format(n=number))
            client.stdin.flush()
            line = client.stdout.readline().strip()
            if line != str(number):
                sys.exit(f"{kind} acknowledges {line!r} for {number}")

    number = 0
    while True:
        number += 1
        begun = time.monotonic()
        write(number)
        write_line(out, f"{kind} {number} {time.monotonic() - begun:.3f}\n")
        # What is written has to have room on the disk, and the others their turn.
        time.sleep(0.02)


def check(kind, position):
    wait_up(kind)
    if kind == "etcd":
        every = {"key": base64("one/"), "range_end": base64("one0"), "count_only": True}
        counted = etcd("/v3/kv/range", every)
        import base64 as decoder

        newest = etcd("/v3/kv/range", {"key": base64("newest")})["kvs"][0]["value"]
        last = int(decoder.b64decode(newest))
        revision = int(counted["header"]["revision"])
        found = {"count": int(counted["count"]), "last": last, "whole": True, "reached": revision >= int(position)}
    else:
        prefix = "numbers." if kind == "mariadb" else ""
        query = "SELECT concat_ws(' ', count(*), max(n), sum(length(filler))) FROM {}{};"
        one, two = (ask(kind, query.format(prefix, table))[0] for table in ("one", "two"))
        count, last, size = (int(part) for part in one.split())
        if kind == "mariadb":
            reached = ask(kind, "SELECT @@gtid_binlog_pos;")[0] == position
        else:
            reached = ask(kind, f"SELECT pg_current_wal_insert_lsn() >= '{position}';")[0] == "t"
        found = {"count": count, "last": last, "whole": one == two and size == 200 * count, "reached": reached}
    print(json.dumps(found))


VERBS = {"set-up": set_up, "load": load, "check": check}
VERBS[sys.argv[1]](*sys.argv[2:])
