"""Lists the VMs of a guestlet-host, and what runs in them.

    list_guests.py [SOCKET]
"""

import sys

import grpc
from guestlet.v1 import admin_pb2, admin_pb2_grpc

SOCKET = "/run/guestlet-host/api.sock"

# The name of the server, of which a unix socket has none: gRPC would say another one in each of its versions.
OPTIONS = [("grpc.default_authority", "localhost")]


def session_name(state):
    """The name of a state, also of one that is newer than this program."""
    try:
        return admin_pb2.SessionState.Name(state).removeprefix("SESSION_STATE_").lower()
    except ValueError:
        return f"state {state}"


def main():
    socket = sys.argv[1] if len(sys.argv) > 1 else SOCKET
    with grpc.insecure_channel(f"unix:{socket}", OPTIONS) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        try:
            # Every call has a deadline.
            known = admin.ListVirtualMachines(admin_pb2.ListVirtualMachinesRequest(), timeout=10)
        except grpc.RpcError as error:
            sys.exit(f"{error.code().name}: {error.details()}")
    for vm in known.virtual_machines:
        # A guest that was never heard of has said nothing.
        system = vm.guest.operating_system.pretty_name if vm.HasField("guest") else "-"
        print(vm.name, session_name(vm.session), system, sep="\t")


if __name__ == "__main__":
    main()
