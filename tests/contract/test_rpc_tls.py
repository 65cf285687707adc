"""Ports behind certificates, and the protocol told to those who ask."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.core.errors import PeerUnavailableError
from h3kv.core.units import NS_PER_S
from h3kv.rpc.addresses import TcpAddress, UnixAddress
from h3kv.rpc.client import PeerChannel
from h3kv.rpc.credentials import Credentials, TlsFiles
from h3kv.rpc.server import ServerConfig

from .rpc_loopback import nvme_stub, serving

WAIT_NS = 30 * NS_PER_S


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_authority(folder: Path) -> None:
    folder.mkdir()
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", folder / "ca.key", "-out", folder / "ca.pem"),
    )


def make_certificate(folder: Path, name: str) -> TlsFiles:
    """Files of one side, signed by the folder's authority."""
    key, request, certificate = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    names = folder / f"{name}.names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(
        *("x509", "-req", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial"),
        *("-days", "2", "-extfile", names, "-out", certificate),
    )
    return TlsFiles(certificate, key, folder / "ca.pem")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")
def test_a_port_serves_who_shows_a_certificate_of_its_authority(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    make_authority(ours)
    make_authority(theirs)
    server = Credentials(tls=make_certificate(ours, "server"))
    caller = Credentials(tls=make_certificate(ours, "caller"))
    stranger = make_certificate(theirs, "stranger")
    # It knows the server's authority, but its own certificate is of another.
    posing = Credentials(tls=TlsFiles(stranger.certificate, stranger.key, ours / "ca.pem"))
    with serving(ServerConfig(TcpAddress("127.0.0.1", 0), server)) as loopback:
        with PeerChannel(loopback.server.address, credentials=caller) as channel:
            channel.wait_until_serving(timeout_ns=WAIT_NS)
            nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())
        for refused in (posing, Credentials(token="t" * 32)):
            with (
                PeerChannel(loopback.server.address, credentials=refused) as channel,
                pytest.raises(PeerUnavailableError),
            ):
                nvme_stub(channel).GetStatistics(nvme.GetStatisticsRequest())


@pytest.mark.parametrize("has_reflection", [True, False])
def test_the_protocol_is_told_only_where_that_is_switched_on(tmp_path: Path, has_reflection: bool) -> None:
    address = UnixAddress(tmp_path / "h3.sock")
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with (
        serving(ServerConfig(address, has_reflection=has_reflection)),
        grpc.insecure_channel(address.target) as channel,
    ):
        answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        if has_reflection:
            names = {service.name for answer in answers for service in answer.list_services_response.service}
            assert {"h3kv.api.nvme_io.v1.NvmeIoService", "grpc.health.v1.Health"} <= names
        else:
            with pytest.raises(grpc.RpcError) as caught:
                next(answers)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
