"""A server in a process of its own, to be killed: `python rpc_process.py SOCKET`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2 as nvme
from h3kv.api.nvme_io.v1 import nvme_io_service_pb2_grpc as nvme_grpc
from h3kv.rpc.addresses import UnixAddress
from h3kv.rpc.server import RpcServer, ServerConfig


class EndlessNvmeIo(nvme_grpc.NvmeIoServiceServicer):
    def WatchMoves(
        self, request: nvme.WatchMovesRequest, context: grpc.ServicerContext
    ) -> Iterator[nvme.WatchMovesResponse]:
        yield nvme.WatchMovesResponse(event=1)
        threading.Event().wait()


if __name__ == "__main__":
    server = RpcServer(ServerConfig(UnixAddress(Path(sys.argv[1]))))
    server.add(nvme_grpc.add_NvmeIoServiceServicer_to_server, EndlessNvmeIo(), nvme.DESCRIPTOR)
    server.start()
    server.announce(is_serving=True)
    threading.Event().wait()
