"""Holds the file systems of a guest still while a command takes a snapshot of its disks.

    freeze.py SOCKET VM COMMAND [ARGUMENT...]

Exits with 0 only if everything was frozen from the beginning of the command to its end: a snapshot that was taken is not to be
used otherwise.
"""

import subprocess
import sys
import time

import grpc
from guestlet.v1 import freeze_pb2, freeze_pb2_grpc

OPTIONS = [("grpc.default_authority", "localhost")]
# Hooks of the guest run before it freezes, and may take their time.
TO_FREEZE = 600
TO_THAW = 90


def thaw(stub, vm, frozen):
    """Thaws what was frozen. An answer that is lost is asked for again for as long as the guest stays frozen."""
    request = freeze_pb2.ThawFileSystemsRequest(name=vm, mount_points=frozen.mount_points)
    end = time.monotonic() + frozen.seconds_left + TO_THAW
    while True:
        try:
            # One that finds nothing frozen, and knows of no freeze that was over too early, comes after a thaw whose answer was
            # lost, or after another client's: nothing proves then that the freeze has lasted.
            return stub.ThawFileSystems(request, timeout=TO_THAW).thawed > 0
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                # ABORTED: the freeze was over before, by its deadline, a crash or a person in the guest.
                say(f"{error.code().name}: {error.details()}")
                return False
        time.sleep(0.5)


def say(words):
    print(f"freeze.py: {words}", file=sys.stderr)


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    socket, vm, *command = sys.argv[1:]
    with grpc.insecure_channel(f"unix:{socket}", OPTIONS) as channel:
        stub = freeze_pb2_grpc.FreezeStub(channel)
        try:
            request = freeze_pb2.FreezeFileSystemsRequest(name=vm)
            frozen = stub.FreezeFileSystems(request, timeout=TO_FREEZE)
        except grpc.RpcError as error:
            # Where the answer was lost, the guest may be frozen, and thaws by its deadline.
            sys.exit(f"freeze.py: {error.code().name}: {error.details()}")
        if not frozen.mount_points:
            sys.exit("freeze.py: the guest has no file system that can be frozen")
        print("frozen:", *frozen.mount_points, flush=True)
        try:
            code = subprocess.run(command, check=False).returncode
        except OSError as error:
            say(f"cannot run {command[0]}: {error}")
            code = 1
        finally:
            # Whatever becomes of the command, and of this program by an interrupt.
            was_frozen = thaw(stub, vm, frozen)
    if not was_frozen:
        sys.exit("freeze.py: the freeze has not lasted: do not use the snapshot")
    sys.exit(code != 0)


if __name__ == "__main__":
    main()
