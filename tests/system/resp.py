"""As much of Redis' protocol as a test needs."""

import socket


class Refused(Exception):
    """The server answered with an error."""


class Redis:
    """A connection. Commands may be sent in advance of their answers."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("rb")

    def send(self, commands):
        parts = []
        for command in commands:
            parts.append(b"*%d\r\n" % len(command))
            for word in command:
                word = word if isinstance(word, bytes) else str(word).encode()
                parts.append(b"$%d\r\n%s\r\n" % (len(word), word))
        self.socket.sendall(b"".join(parts))

    def answer(self):
        line = self.lines.readline()
        if not line:
            raise ConnectionError("the server has ended the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise Refused(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self.lines.read(length + 2)[:-2]
        if kind == b"*":
            return [self.answer() for _ in range(int(rest))]
        return rest

    def __call__(self, *command):
        self.send([command])
        return self.answer()

    def many(self, commands):
        """Answers of commands that go out together; few enough for both socket buffers."""
        commands = list(commands)
        self.send(commands)
        return [self.answer() for _ in commands]

    def close(self):
        self.lines.close()
        self.socket.close()
