"""Sends random packets to a daemon's socket: `messages.py SOCKET SEED COUNT`. Prints how many went.

Run as a user without rights: root could order the daemon to end, and a random packet does.
"""

import random
import socket
import sys

HELLO = b"\x00\x01\x02"


class Packets:
    """Random packets: bytes, and mutations of packets that a real client sends."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        # A hello of a control connection, of a client and of a child, and some requests: version,
        # then small discriminants and varints.
        self.known = [HELLO, b"\x00\x01\x00\x04evil\x01", b"\x00\x01\x01\x07\x01",
                      bytes([11, 0]), bytes([11, 2, 0]), bytes([11, 4]), bytes([10]),
                      b"\x02" + b"\x80" * 4 + b"\x01" + b"\x80" * 3 + b"\x01\x00\x00",
                      b"\x01" + b"\xff" * 9 + b"\x01" + b"\xff" * 9 + b"\x01\x02"]

    def next(self):
        kind = self.random.random()
        if kind < 0.3:
            return self.random.randbytes(self.random.choice((1, 2, 3, 8, 40, 300)))
        packet = bytearray(self.random.choice(self.known))
        while kind < 0.8 and self.random.random() < 0.7:
            at = self.random.randrange(len(packet))
            change = self.random.random()
            if change < 0.6:
                packet[at] = self.random.choice((0, 1, 0x7f, 0x80, 0xff, self.random.randrange(256)))
            elif change < 0.8:
                packet[at:at] = self.random.randbytes(self.random.randrange(1, 4))
            elif len(packet) > 1:
                del packet[at]
        return bytes(packet)


def talk(path, packets):
    """One connection; gives the number of packets sent before the daemon had enough."""
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(30)
        peer.connect(path)
        try:
            # Half of the connections say a proper hello first, so as to get further.
            if packets.random.random() < 0.5:
                peer.send(HELLO)
            for _ in range(packets.random.randrange(1, 40)):
                peer.send(packets.next())
                sent += 1
                if packets.random.random() < 0.2:
                    peer.recv(65536)
        except (BrokenPipeError, ConnectionResetError):
            pass
    return sent


def main():
    path, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    packets = Packets(seed)
    sent = 0
    while sent < count:
        sent += talk(path, packets)
    print(sent)


if __name__ == "__main__":
    main()
