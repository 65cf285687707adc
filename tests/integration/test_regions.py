"""Regions between real processes: one owns them, others hold some of their room, and any of them may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from tests.integration.region_rig import GEOMETRY, SECOND, TOKEN, Child, Owner, filled

from h3kv.core.errors import AddressInUseError, PeerBusyError, PeerUnavailableError, StaleHandleError, StoreBusyError
from h3kv.core.types import SlotHandle, Tier
from h3kv.memory.leases import check_current
from h3kv.memory.messages import Refused, encode
from h3kv.memory.region_client import RegionClient
from h3kv.memory.region_format import RegionIdentity
from h3kv.memory.region_hub import HolderGone, HolderJoined, RegionHub
from h3kv.testing.slot_views import SlotViews

HELLO = b'{"hello": "a", "token": "00000000000000000000000000000000", "holder": null, "regions": %b}'
Start = Callable[..., Child]


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "regions.sock"


@pytest.fixture
def start(socket_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def make(role: str, number: int = 1) -> Child:
        children.append(Child(role, socket_path, number))
        return children[-1]

    yield make
    for child in children:
        if child.process.poll() is None:
            child.kill()


def test_holder_that_was_killed_is_noticed_and_its_room_taken_back(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(1, 4):
        child = start("holder", number)
        holder = owner.connect(child)
        handles = filled(owner, child, holder, mark=number)
        assert [bytes(SlotViews(owner.host).bytes(handle)[:2]) for handle in handles] == [bytes([number]) * 2] * 3
        child.kill()
        assert owner.events() == [HolderGone(holder, f"holder-{number}")]
        assert len(owner.leases.reclaim(holder)) == 2
        for handle in handles:
            with pytest.raises(StaleHandleError):
                check_current(owner.host.table, handle)
        assert owner.leases.free_units == 4
        owner.leases.check_integrity()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    owner.stop()


def test_restarted_owner_adopts_what_holders_kept(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    children = [start("holder", number) for number in (1, 2)]
    holders = [owner.connect(child) for child in children]
    handles = [filled(owner, child, holder, mark=holder) for child, holder in zip(children, holders, strict=True)]
    owner.stop()
    for child in children:
        assert child.do("await_end", timeout_s=20) == {"ended": True}
        child.tell("connect", timeout_s=20)
    owner = Owner(socket_path, token=b"n" * 16)
    assert [region.identity for region in owner.adopted] == [
        RegionIdentity(1, "host", TOKEN),
        RegionIdentity(2, "table", TOKEN),
    ]
    events = owner.events(2)
    assert {(each.holder, each.has_returned) for each in events if isinstance(each, HolderJoined)} == {
        (holder, True) for holder in holders
    }
    for child, holder in zip(children, holders, strict=True):
        assert child.answer() == {"outcome": "kept", "holder": holder, "regions": ["host", "table"]}
        assert child.do("check", mark=holder) == {"intact": True}
    assert owner.leases.holders == set(holders)
    for handle in handles[0]:
        check_current(owner.host.table, handle)
    owner.leases.check_integrity()
    owner.stop()


def test_holder_that_did_not_wait_for_a_successor_returns_to_it_all_the_same(socket_path: Path, start: Start) -> None:
    owner, child = Owner(socket_path), start("holder")
    holder = owner.connect(child)
    filled(owner, child, holder, mark=holder)
    owner.stop()
    assert child.do("await_end", timeout_s=20) == {"ended": True}
    hub = RegionHub.open(socket_path, boot_token=b"n" * 16)
    # It speaks before anybody listens, gives up, and speaks again: both are heard one after the other.
    assert child.do("connect", timeout_s=0.1)["error"] == "PeerUnavailableError"
    child.tell("connect", timeout_s=20)
    regions = hub.adopt(20 * SECOND)
    assert regions
    hub.serve(regions)
    events: list[object] = []
    deadline = time.monotonic() + 30
    while not events:
        assert time.monotonic() < deadline
        events += hub.poll(SECOND)
        hub.check_integrity()
    assert [(each.holder, each.has_returned) for each in events if isinstance(each, HolderJoined)] == [(holder, True)]
    assert child.answer() == {"outcome": "kept", "holder": holder, "regions": ["host", "table"]}
    assert child.do("check", mark=holder) == {"intact": True}
    hub.close()
    for region in regions:
        region.close()


def test_killed_owner_is_followed_by_one_that_adopts_its_regions(socket_path: Path, start: Start) -> None:
    first = start("owner", 7)
    assert first.do("start", adopt_s=0) == {"adopted": []}
    child = start("holder", 1)
    child.tell("connect", timeout_s=20)
    assert first.do("poll", events=1) == {"events": [["joined", 2, "holder-1", False]]}
    assert child.answer()["outcome"] == "mapped"
    child.do("begin", units=[1])
    child.do("fill", sizes=[8, 8], mark=42)
    first.kill()
    assert child.do("await_end", timeout_s=20) == {"ended": True}
    child.tell("connect", timeout_s=20)
    second = start("owner", 8)
    assert second.do("start", adopt_s=20) == {"adopted": ["host", "table"]}
    assert second.do("poll", events=1) == {"events": [["joined", 2, "holder-1", True]]}
    assert child.answer()["outcome"] == "kept"
    assert child.do("check", mark=42) == {"intact": True}
    third = start("holder", 3)
    third.tell("connect", timeout_s=20)
    assert second.do("poll", events=1) == {"events": [["joined", 3, "holder-3", False]]}
    assert third.answer()["outcome"] == "mapped"


def test_holder_that_does_not_return_is_reported_gone(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    children = [start("holder", number) for number in (1, 2)]
    holders = [owner.connect(child) for child in children]
    for child, holder in zip(children, holders, strict=True):
        filled(owner, child, holder, mark=holder)
    owner.stop()
    children[0].kill()
    children[1].tell("connect", timeout_s=20)
    owner = Owner(socket_path, token=b"n" * 16, adopt_s=0.5)
    assert owner.adopted
    events = owner.events(2)
    assert events[0] == HolderJoined(holders[1], "holder-2", b"\2" * 16, has_returned=True)
    assert events[1] == HolderGone(holders[0], "holder-1")
    assert children[1].answer()["outcome"] == "kept"
    assert len(owner.leases.reclaim(holders[0])) == 2
    assert owner.leases.holders == {holders[1]}
    owner.leases.check_integrity()
    owner.stop()


def test_no_region_is_made_while_anybody_has_the_old_one_mapped(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    child = start("holder", 1)
    owner.connect(child)
    owner.stop()
    # It has the regions and says nothing.
    with pytest.raises(StoreBusyError, match="still has memory of the earlier owner"):
        Owner(socket_path, token=b"n" * 16, adopt_s=0.2)
    child.kill()
    owner = Owner(socket_path, token=b"n" * 16, adopt_s=0.2)
    assert owner.adopted == ()
    owner.stop()


def test_late_holder_lets_go_before_new_regions_are_made(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    child = start("holder", 1)
    owner.connect(child)
    child.do("keep_view")
    owner.stop()
    marker = socket_path.with_name("regions.sock.regions")
    assert marker.stat().st_mode & 0o777 == 0o600
    # Whoever wrote this never gave that holder its regions.
    marker.write_text(marker.read_text(encoding="ascii").replace("01" * 16, "02" * 16), encoding="ascii")
    second = start("owner", 8)
    second.tell("start", adopt_s=20)
    assert child.do("connect", timeout_s=20)["outcome"] == "unmap_first"
    assert child.do("unmap")["error"] == "RegionError"
    child.do("drop_view")
    assert child.do("unmap") == {}
    assert second.answer() == {"adopted": []}
    child.tell("connect", timeout_s=20)
    assert second.do("poll", events=1) == {"events": [["joined", 2, "holder-1", False]]}
    assert child.answer()["outcome"] == "mapped"


def test_second_owner_is_refused_while_the_first_lives(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    with pytest.raises(AddressInUseError, match="another process owns the regions"):
        RegionHub.open(socket_path, boot_token=b"x" * 16)
    child = start("holder", 1)
    owner.connect(child)
    owner.stop()
    child.kill()
    Owner(socket_path).stop()
    assert sorted(path.name for path in socket_path.parent.iterdir()) == [
        "regions.sock.holders",
        "regions.sock.owner",
    ]


def test_slot_that_is_overwritten_while_it_is_read_is_never_taken_for_another(socket_path: Path, start: Start) -> None:
    """Each payload is its slot's generation, over and over."""
    owner = Owner(socket_path)
    child = start("holder", 1)
    holder = owner.connect(child)
    child.do("begin", units=owner.leases.lease(holder, 1))
    slot = child.do("spin", blocks=1)["slot"]
    views, table = SlotViews(owner.host), owner.host.table
    copied = np.empty(GEOMETRY.block_bytes // 8, dtype=np.uint64)
    deadline = time.monotonic() + 60
    rounds, whole, stale = 0, 0, 0
    while rounds < 50_000 or not (whole and stale):
        assert time.monotonic() < deadline, (rounds, whole, stale)
        rounds += 1
        handle = SlotHandle(Tier.HOST, slot, 1, int(table["generation"][slot]))
        try:
            views.read(handle, memoryview(copied).cast("B"))
        except StaleHandleError:
            stale += 1
            continue
        # The holder may not have filled the slot yet: then some of it is older, but nothing newer.
        whole += int(copied[-1]) == handle.generation
        assert copied.max() <= handle.generation, "bytes of a later slot under an earlier generation"
    del views, table
    child.kill()
    assert owner.events() == [HolderGone(holder, "holder-1")]
    owner.leases.reclaim(holder)
    owner.leases.check_integrity()
    owner.stop()


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"{}",
        b"[" * 10_000,
        b'{"hello": "a"}',
        b'{"hello": "A b", "token": "' + b"00" * 16 + b'", "holder": null, "regions": []}',
        b'{"hello": "a", "token": "00", "holder": null, "regions": []}',
        b'{"hello": "a", "token": "' + b"00" * 16 + b'", "holder": true, "regions": []}',
        b'{"hello": "a", "token": "' + b"00" * 16 + b'", "holder": -1, "regions": []}',
        b'{"hello": "a", "token": "' + b"00" * 16 + b'", "holder": null, "regions": [[1, "host", "00"]]}',
        b'{"hello": "a", "token": "'
        + b"00" * 16
        + b'", "holder": null, "regions": [[99, "host", "'
        + b"00" * 16
        + b'"]]}',
        b'{"hello": "a", "token": "'
        + b"00" * 16
        + b'", "holder": null, "regions": [[1, "host", "'
        + b"00" * 16
        + b'"]]}',
        b'{"welcome": "' + b"00" * 16 + b'", "holder": 2, "regions": []}',
        b'{"unmap": true}',
        b'{"x": NaN}',
        b"\xff" * 20,
        b" " * 20_000,
    ],
)
def test_malformed_messages_end_the_connection_and_nothing_else(socket_path: Path, packet: bytes) -> None:
    owner = Owner(socket_path)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(str(socket_path))
        socket.send_fds(channel, [packet], [owner.host.fd or 0, 0])
        channel.settimeout(10)
        while owner.hub.refused_total == 0:
            assert owner.hub.poll(SECOND) == []
        assert channel.recv(1000) == b""
    owner.hub.check_integrity()
    assert owner.hub.holders == {}
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    owner.stop()


def test_holder_that_speaks_twice_is_shown_out(socket_path: Path) -> None:
    owner = Owner(socket_path)
    hello = HELLO % b"[]"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(str(socket_path))
        channel.send(hello)
        (joined,) = owner.events()
        assert joined.holder == 2
        channel.send(hello)
        assert owner.events() == [HolderGone(2, "a")]
    owner.stop()


def test_regions_under_a_lie_are_not_adopted(socket_path: Path, start: Start) -> None:
    """Offered under the right names, but others."""
    owner = Owner(socket_path)
    child = start("holder", 1)
    holder = owner.connect(child)
    names = [[1, "host", TOKEN.hex()], [2, "table", TOKEN.hex()]]
    owner.stop()
    hub = RegionHub.open(socket_path, boot_token=b"n" * 16)
    hello = {"hello": "holder-1", "token": "01" * 16, "holder": holder, "regions": names}
    wrong = [os.memfd_create("wrong"), os.memfd_create("wrong")]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(str(socket_path))
        socket.send_fds(channel, [json.dumps(hello).encode()], wrong)
        with pytest.raises(StoreBusyError):
            hub.adopt(SECOND // 5)
        assert json.loads(channel.recv(1000)) == {"unmap": True}
    assert hub.refused_total == 1
    for fd in wrong:
        os.close(fd)
    hub.check_integrity()
    hub.close()


def test_socket_and_its_files_have_the_mode_that_was_asked_for(socket_path: Path) -> None:
    for mode in (0o600, 0o660):
        hub = RegionHub.open(socket_path, boot_token=TOKEN, mode=mode)
        assert socket_path.stat().st_mode & 0o777 == mode
        assert not list(socket_path.parent.glob("*.new"))
        hub.close()
        for path in socket_path.parent.iterdir():
            assert path.stat().st_mode & 0o777 == mode
            path.unlink()


def test_client_without_an_owner_says_where_it_looked(socket_path: Path) -> None:
    client = RegionClient(socket_path, name="alone", boot_token=TOKEN)
    assert not client.is_connected
    with pytest.raises(PeerUnavailableError, match=r"nobody serves regions at .*regions\.sock"):
        client.connect(SECOND // 20)
    client.close()


def test_client_before_whom_too_many_wait_says_that_nobody_serves(socket_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(str(socket_path))
        listener.listen(0)
        earlier = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        earlier.connect(str(socket_path))
        client = RegionClient(socket_path, name="gpu_worker", boot_token=b"t" * 16)
        with pytest.raises(PeerUnavailableError):
            client.connect(0)
        client.close()


def test_owner_that_is_there_has_time_to_answer_a_client_that_does_not_wait_for_one(socket_path: Path) -> None:
    client = RegionClient(socket_path, name="ann_offload", boot_token=TOKEN)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        with ThreadPoolExecutor(max_workers=1) as pool:
            connecting = pool.submit(client.connect, 0)
            with listener.accept()[0] as channel:
                assert channel.recv(4096)
                assert not wait([connecting], timeout=0.05).done
                channel.send(encode(Refused("it is full")))
            with pytest.raises(PeerBusyError, match="it is full"):
                connecting.result()
    client.close()


def test_client_of_a_name_and_token_that_is_connected_is_refused(socket_path: Path, start: Start) -> None:
    owner = Owner(socket_path)
    first, second = start("holder", 1), start("holder", 1)
    owner.connect(first)
    second.tell("connect", timeout_s=20)
    while owner.hub.refused_total == 0:
        assert owner.hub.poll(SECOND) == []
    assert second.answer()["error"] == "PeerBusyError"
    owner.stop()
