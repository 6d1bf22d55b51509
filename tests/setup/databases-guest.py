#!/usr/bin/python3
"""Runs in guests whose databases are on disks that databases.sh makes.

    databases set-up KIND …  users, units and mounts; starts these servers
    databases load KIND OUT  writes numbers for ever; each that was acknowledged goes to OUT, with the time since the boot in ms
    databases check KIND [POSITION]
                             what is there, and whether it is up to that position of a receipt: prints a JSON document
"""

import base64
import http.client
import json
import os
import re
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
# A row tells by itself whether it is whole.
FILLER = {"postgresql": "repeat(md5(n::text), 6)", "mariadb": "BINARY repeat(md5(n), 6)"}
INSERT = {
    "postgresql": "BEGIN; INSERT INTO one SELECT n, {filler} FROM (SELECT {n} AS n) AS t; "
    "INSERT INTO two SELECT * FROM one WHERE n = {n}; COMMIT; SELECT {n};\n",
    "mariadb": "BEGIN; INSERT INTO numbers.one SELECT n, {filler} FROM (SELECT {n} AS n) AS t; "
    "INSERT INTO numbers.two SELECT * FROM numbers.one WHERE n = {n}; COMMIT; SELECT {n};\n",
}
COUNT = "SELECT concat_ws(' ', count(*), min(n), max(n), sum(CASE WHEN filler = {} THEN 0 ELSE 1 END)) FROM {};"
# What servers say of the part of their log that they have read again: where it begins and where it ends.
REPLAYED = {
    "postgresql": r"redo (?:starts|done) at ([0-9A-F]+/[0-9A-F]+)",
    "mariadb": r"(?:from checkpoint|End of log at) LSN=(\d+)",
}


def as_user(kind, *words):
    """A command line of the database's user."""
    user = USERS[kind][0]
    become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    return [*become, "env", f"LD_LIBRARY_PATH={HOME}/lib", *words]


def command(kind):
    """The client of a database."""
    return as_user(kind, *(PSQL if kind == "postgresql" else MYSQL))


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


def encoded(text):
    return base64.b64encode(text.encode()).decode()


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
    return {"requestPut": {"key": encoded(name), "value": encoded(str(number))}}


def load(kind, out):
    write = None
    if kind == "etcd":

        def write(number):
            pair = [put(f"{name}/{number:09}", number) for name in ("one", "two")]
            etcd("/v3/kv/txn", {"success": [*pair, put("newest", number)]})

    else:
        client = subprocess.Popen(command(kind), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def write(number):
            client.stdin.write(INSERT[kind].format(n=number, filler=FILLER[kind]))
            client.stdin.flush()
            line = client.stdout.readline().strip()
            if line != str(number):
                sys.exit(f"{kind} acknowledges {line!r} for {number}")

    number = 0
    while True:
        number += 1
        write(number)
        write_line(out, f"{kind} {number} {time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000000}\n")
        # What is written has to have room on the disk, and the others their turn.
        time.sleep(0.02)


def tables(kind):
    """Of both tables: how many rows there are, the first and the last number, and how many rows are not whole."""
    prefix = "numbers." if kind == "mariadb" else ""
    queries = [COUNT.format(FILLER[kind], prefix + table) for table in ("one", "two")]
    return [[int(part) for part in ask(kind, query)[0].split()] for query in queries]


def check_postgresql(position):
    one, two = tables("postgresql")
    # Indexes and heaps agree.
    words = ["--install-missing", "--heapallindexed", "-t", "one", "-t", "two", "-h", "/run/postgresql", "-U", "postgres"]
    amcheck = as_user("postgresql", f"{HOME}/usr/lib/postgresql/15/bin/pg_amcheck", *words, "postgres")
    checked = subprocess.run(amcheck, capture_output=True, text=True)
    is_sound = checked.returncode == 0
    # At the end of a page the server may have written a part of a record, which recovery leaves out.
    reached = f"SELECT pg_last_wal_replay_lsn() >= '{position}' OR ('{position}'::pg_lsn - '0/0') % 8192 = 0;"
    return {
        "count": one[0],
        "last": one[2],
        "whole": one == two and one[1] == 1 and one[3] == 0 and is_sound,
        "problem": "" if is_sound else checked.stdout + checked.stderr,
        "reached": position and ask("postgresql", reached)[0] == "t",
    }


def check_mariadb(position):
    one, two = tables("mariadb")
    checked = [row.split("\t") for row in ask("mariadb", "CHECK TABLE numbers.one, numbers.two EXTENDED;")]
    is_sound = len(checked) == 2 and all(row[2:] == ["status", "OK"] for row in checked)
    # Nothing is committed from the position on until the thaw.
    return {
        "count": one[0],
        "last": one[2],
        "whole": one == two and one[1] == 1 and one[3] == 0 and is_sound,
        "problem": "" if is_sound else str(checked),
        "reached": position and ask("mariadb", "SELECT @@gtid_binlog_pos;")[0] == position,
    }


def check_etcd(position):
    newest, revision = etcd_range("newest", {})
    counts, values = [], []
    for name in ("one/", "two/"):
        every = {"range_end": encoded(name[:-1] + "0"), "count_only": True}
        counts.append(int(etcd("/v3/kv/range", {"key": encoded(name), **every}).get("count", 0)))
        last = {"range_end": encoded(name[:-1] + "0"), "limit": 1000, "sort_order": "DESCEND", "sort_target": "KEY"}
        values.append({key[len(name):]: value for key, value in etcd_range(name, last)[0].items()})
    last = int(newest["newest"])
    is_sound = values[0] == values[1] and all(int(key) == int(value) for key, value in values[0].items())
    return {
        "count": counts[0],
        "last": last,
        "whole": counts[0] == counts[1] and is_sound,
        "reached": position and revision >= int(position),
    }


def etcd_range(key, more):
    """Keys with their values, and the revision."""
    answer = etcd("/v3/kv/range", {"key": encoded(key), **more})
    pairs = ({name: base64.b64decode(pair[name]).decode() for name in ("key", "value")} for pair in answer["kvs"])
    return {pair["key"]: pair["value"] for pair in pairs}, int(answer["header"]["revision"])


def replayed(kind):
    """Bytes of its log that a server has read again when it was started; None if it does not say so."""
    unit = subprocess.run(["systemctl", "show", "--value", "--property", "InvocationID", kind], capture_output=True, text=True)
    words = ["journalctl", "--no-pager", "--output", "cat", f"_SYSTEMD_INVOCATION_ID={unit.stdout.strip()}"]
    log = subprocess.run(words, capture_output=True, text=True).stdout

    def number(text):
        high, _, low = text.rpartition("/")
        return (int(high, 16) << 32) + int(low, 16) if high else int(low)

    places = [number(text) for text in re.findall(REPLAYED[kind], log)] if kind in REPLAYED else []
    return places[-1] - places[0] if len(places) > 1 else None


def check(kind, position=""):
    wait_up(kind)
    found = {"postgresql": check_postgresql, "mariadb": check_mariadb, "etcd": check_etcd}[kind](position)
    print(json.dumps({**found, "replayed": replayed(kind)}))


VERBS = {"set-up": set_up, "load": load, "check": check}
VERBS[sys.argv[1]](*sys.argv[2:])
