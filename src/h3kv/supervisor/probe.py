"""Asks a process whether it serves, as cheaply as can be: `python -I -S probe.py unix:///run/h3/nvme_io.sock`.

The question is the standard health service's `Check`, in bare HTTP/2: an interpreter that imports gRPC takes half a
second of a core, too much for what every container does every few seconds. It imports nothing of ours.

    preface  SETTINGS  HEADERS(stream 1)  DATA(stream 1, end)  -->
                        <-- SETTINGS ... HEADERS  DATA: 0 | 00 00 00 02 | 08 01     field 1 = 1, SERVING

    frame    0            3      4       5             9
             +------------+------+-------+-------------+-----------
             | length u24 | type | flags | stream u32  | payload
             +------------+------+-------+-------------+-----------
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable

UNIX = "unix://"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
QUESTION = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"localhost"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
EMPTY_MESSAGE = bytes(5)
"""Not compressed, no bytes: the service whose name is empty is the whole process."""
SERVING = b"\x00\x00\x00\x00\x02\x08\x01"
FRAMES_MAX = 64
FRAME_BYTES_MAX = 1 << 14


def is_serving(address: str, *, timeout_s: float) -> bool:
    """Whether a process serves at an address: `unix:///path`, or `http://host:port/path` for a page.

    False whatever keeps it from saying yes in that time.
    """
    try:
        if address.startswith(UNIX):
            return _check(address.removeprefix(UNIX), timeout_s)
        return _fetch(address, timeout_s)
    except (OSError, EOFError):
        return False


def _check(path: str, timeout_s: float) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        headers = b"".join(
            b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in QUESTION
        )
        connection.sendall(
            PREFACE
            + _frame(SETTINGS, 0, 0, b"")
            + _frame(HEADERS, END_HEADERS, 1, headers)
            + _frame(DATA, END_STREAM, 1, EMPTY_MESSAGE)
        )
        with connection.makefile("rb") as answers:
            for _ in range(FRAMES_MAX):
                kind, flags, payload = _read_frame(answers.read)
                if kind == DATA:
                    return payload == SERVING
                if kind in {RST_STREAM, GOAWAY} or (kind == HEADERS and flags & END_STREAM):
                    return False
                if kind in {SETTINGS, PING} and not flags & ACK:
                    connection.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
    return False


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _read_frame(read: Callable[[int], bytes]) -> tuple[int, int, bytes]:
    head = read(9)
    if len(head) < 9:
        raise EOFError
    size = int.from_bytes(head[:3], "big")
    if size > FRAME_BYTES_MAX:
        raise EOFError
    return head[3], head[4], read(size)


def _fetch(url: str, timeout_s: float) -> bool:
    # Most probes ask a socket and need none of it.
    import http.client
    from urllib.parse import urlsplit

    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
    try:
        connection.request("GET", place.path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1], timeout_s=float(sys.argv[2]) if len(sys.argv) > 2 else 2.0) else 1)
