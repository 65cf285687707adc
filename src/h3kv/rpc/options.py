"""Bounds that both ends of a connection share."""

from __future__ import annotations

from typing import Final

from h3kv.core.units import NS_PER_MS, NS_PER_S

MESSAGE_BYTES_MAX: Final = 8 << 20
"""One message. The largest is a prompt: a million tokens are up to 5 MiB, as text or as numbers. Longer lists come in
pages."""

DEADLINE_NS_MAX: Final = 24 * 3_600 * NS_PER_S
"""A deadline further away than a day is none: streams are opened anew before."""

KEEPALIVE_NS: Final = 10 * NS_PER_S
"""Between two pings of a connection on which nothing else passes."""

KEEPALIVE_TIMEOUT_NS: Final = 20 * NS_PER_S
"""A peer that answers no ping for so long is gone: longer than a process may be stopped and go on. Calls that wait
have deadlines of their own."""

RECONNECT_NS: Final = (50 * NS_PER_MS, NS_PER_S)
"""Between two attempts to connect: at first, and at most. A restarted peer is back in a second."""

Options = tuple[tuple[str, int], ...]


def shared_options(message_bytes_max: int) -> Options:
    """For servers and channels."""
    return (
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.keepalive_time_ms", KEEPALIVE_NS // NS_PER_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_NS // NS_PER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_options(message_bytes_max: int) -> Options:
    """For a server: two of them never share a port, and pings as often as channels send them are fine."""
    return (
        *shared_options(message_bytes_max),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_NS // NS_PER_MS // 2),
    )


def channel_options(message_bytes_max: int) -> Options:
    """For a channel: it has a connection of its own, and never repeats a call by itself."""
    first_ns, longest_ns = RECONNECT_NS
    return (
        *shared_options(message_bytes_max),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", first_ns // NS_PER_MS),
        ("grpc.max_reconnect_backoff_ms", longest_ns // NS_PER_MS),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    )
