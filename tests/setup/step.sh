#!/bin/sh
# Runs one step of the gate and says how long it took: step.sh NAME COMMAND [ARGUMENT …]
name=$1
shift
started=$(date +%s)
echo "==> $name"
"$@"
status=$?
took=$(($(date +%s) - started))
if [ $status -ne 0 ]; then
    echo "==> $name FAILED after $took s (status $status): $*" >&2
    exit $status
fi
echo "==> $name: done in $took s"
