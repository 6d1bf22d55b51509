#!/bin/sh
# restart VERB [SYSTEMCTL]: run by the package's scripts. VERB is restart, once the new agent is in place, or stop, before
# the agent is removed.
#
# Where the agent itself runs the upgrade or the removal (guest-exec), its end would end that half-way, with all that runs
# in its unit: it is put off until what guest-exec has started has ended, and its client has had time to ask how; by an
# hour at most, because what runs there may never end.
set -eu
verb=${1:-}
service=guestlet.service
patience=30
case $verb in
    restart) doing=upgrade ended=restarted units=$service ;;
    stop) doing=removal ended=stopped units="$service guestlet.socket" ;;
    *)
        echo "usage: $0 restart|stop [SYSTEMCTL]" >&2
        exit 2
        ;;
esac

# is_inside PROCESS: whether it runs in the agent's unit.
is_inside() { grep -Eqs "/$service(/|\$)" "/proc/$1/cgroup"; }

agent=$(systemctl show --value --property MainPID "$service")
outermost=
process=$$
while [ "$process" -gt 1 ] && [ "$process" != "$agent" ] && is_inside "$process"; do
    outermost=$process
    process=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$process/status")
done
if [ -z "$outermost" ]; then
    # While file systems are frozen the agent ends only after the thaw, and this waits for it.
    # shellcheck disable=SC2086
    exec "${2:-systemctl}" "$verb" $units
fi
echo "guestlet runs this $doing: it is $ended $patience s after its end"
# What is removed may be installed again meanwhile: then it is not stopped. Its units are known as long as they run.
# shellcheck disable=SC2016
systemd-run --quiet --collect --unit "guestlet-$verb-$outermost" /bin/sh -c \
    'for second in $(seq 3600); do grep -Eqs "/$2(/|\$)" "/proc/$1/cgroup" || break; sleep 1; done
    sleep "$3"
    if [ "$4" = restart ] || [ -e /usr/bin/guestlet ]; then exec systemctl restart "$2"; fi
    exec systemctl stop "$2" guestlet.socket' \
    sh "$outermost" "$service" "$patience" "$verb"
