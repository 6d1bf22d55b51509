#!/bin/sh
# restart [SYSTEMCTL]: run by the package's scripts once the new agent is in place.
#
# Where the agent itself runs the upgrade (guest-exec), its restart would end the upgrade half-way, with all that runs in its
# unit: it is put off until what guest-exec has started has ended, and its client has had time to ask how; by an hour at
# most, because what runs there may never end.
set -eu
unit=guestlet.service
patience=30

# is_inside PROCESS: whether it runs in the agent's unit.
is_inside() { grep -Eqs "/$unit(/|\$)" "/proc/$1/cgroup"; }

agent=$(systemctl show --value --property MainPID "$unit")
outermost=
process=$$
while [ "$process" -gt 1 ] && [ "$process" != "$agent" ] && is_inside "$process"; do
    outermost=$process
    process=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$process/status")
done
if [ -z "$outermost" ]; then
    # While file systems are frozen the agent ends only after the thaw, and this waits for it.
    exec "${1:-systemctl}" restart "$unit"
fi
echo "guestlet runs this upgrade: it is restarted $patience s after its end"
systemd-run --quiet --collect --unit "guestlet-restart-$outermost" /bin/sh -c \
    'for second in $(seq 3600); do grep -Eqs "/$2(/|\$)" "/proc/$1/cgroup" || break; sleep 1; done
    sleep "$3"; exec systemctl restart "$2"' \
    sh "$outermost" "$unit" "$patience"
