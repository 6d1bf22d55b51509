"""Runs a program in the guest of a VM: its output and its exit code are this program's own.

    exec.py SOCKET VM PROGRAM [ARGUMENT...]

A connection that breaks is a pause: another one goes on at the byte at which the one before has ended.
"""

import os
import queue
import secrets
import sys
import time

import grpc
from guestlet.v1 import exec_pb2, exec_pb2_grpc

OPTIONS = [("grpc.default_authority", "localhost")]
# How long it is tried to connect again. The program waits for 10 minutes unless StartProgram.wait_seconds says otherwise.
PATIENCE = 60
# Not the guest's word, but that of a guestlet-host that has only just started, or of a guest that is not back yet.
MAY_PASS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
SAID_BY_GUEST = "guestlet-said-by-guest"
EXIT_CODE = "guestlet-exit-code"


class Program:
    """A program in a guest, and what of its output was written here."""

    def __init__(self, vm, arguments):
        self.vm = vm
        self.id = secrets.token_hex(6)
        self.arguments = arguments
        self.was_asked_for = False
        self.ended = None
        # The numbers of the bytes that come next.
        self.output = 0
        self.errors = 0

    def opening(self):
        """The first message of a call: it is started once, and attached to from then on."""
        if self.was_asked_for:
            attach = exec_pb2.AttachProgram(
                name=self.vm, id=self.id, output_from=self.output, errors_from=self.errors
            )
            return exec_pb2.ToProgram(attach=attach)
        self.was_asked_for = True
        arguments = [os.fsencode(argument) for argument in self.arguments]
        return exec_pb2.ToProgram(start=exec_pb2.StartProgram(name=self.vm, id=self.id, arguments=arguments))

    def converse(self, stub):
        """One call, until the program has ended, or with an error."""
        requests = queue.SimpleQueue()
        requests.put(self.opening())
        try:
            # No deadline: a program may run for as long as it likes.
            for answer in stub.RunProgram(iter(requests.get, None)):
                kind = answer.WhichOneof("message")
                if kind == "output":
                    self.output = write(sys.stdout.buffer, answer.output)
                elif kind == "errors":
                    self.errors = write(sys.stderr.buffer, answer.errors)
                elif kind == "ended":
                    self.ended = answer.ended
                    requests.put(exec_pb2.ToProgram(forget=exec_pb2.ForgetProgram()))
                if kind in ("output", "errors"):
                    # The guest keeps what was not taken, and lets the program wait when that is too much.
                    taken = exec_pb2.ProgramTaken(output=self.output, errors=self.errors)
                    requests.put(exec_pb2.ToProgram(taken=taken))
        finally:
            requests.put(None)

    def run(self, stub):
        """As many calls as it takes. Returns the exit code."""
        lost_since = None
        while True:
            before = (self.output, self.errors)
            try:
                self.converse(stub)
                why = "the call has ended"
            except grpc.RpcError as error:
                metadata = dict(error.trailing_metadata() or ())
                if self.ended is None:
                    if EXIT_CODE in metadata:
                        # There is no such program, or it cannot be executed.
                        say(error.details())
                        return int(metadata[EXIT_CODE])
                    is_first = lost_since is None and error.code() != grpc.StatusCode.UNAVAILABLE
                    if SAID_BY_GUEST in metadata or error.code() not in MAY_PASS or (is_first and before == (0, 0)):
                        say(f"{error.code().name}: {error.details()}")
                        return 125
                why = error.details()
            if self.ended is not None:
                return exit_code(self.ended)
            if before != (self.output, self.errors):
                lost_since = None
            now = time.monotonic()
            lost_since = now if lost_since is None else lost_since
            if now - lost_since > PATIENCE:
                say(f"lost the program {self.id}: {why}")
                return 255
            time.sleep(0.2)


def write(stream, data):
    """Writes what has come; returns the number of the byte after it."""
    stream.write(data.data)
    stream.flush()
    return data.offset + len(data.data)


def exit_code(ended):
    """As a shell says it."""
    how = ended.WhichOneof("how")
    if how == "exit_code":
        return ended.exit_code
    if how == "signal":
        return 128 + ended.signal
    say(f"how the program ended is not known: {ended.unknown}")
    return 125


def say(words):
    print(f"exec.py: {words}", file=sys.stderr)


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    socket, vm, *arguments = sys.argv[1:]
    with grpc.insecure_channel(f"unix:{socket}", OPTIONS) as channel:
        code = Program(vm, arguments).run(exec_pb2_grpc.ExecStub(channel))
    sys.exit(code)


if __name__ == "__main__":
    main()
