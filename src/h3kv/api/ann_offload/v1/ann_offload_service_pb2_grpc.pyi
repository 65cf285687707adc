# Written by tools/genproto.py from proto/h3kv/api/ann_offload/v1/ann_offload_service.proto. Do not edit: run `make proto`.
import abc
from collections.abc import Iterator

import grpc

from h3kv.api.ann_offload.v1 import ann_offload_service_pb2

class AnnOffloadServiceStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    GetStatistics: grpc.UnaryUnaryMultiCallable[ann_offload_service_pb2.GetStatisticsRequest, ann_offload_service_pb2.GetStatisticsResponse]
    Drain: grpc.UnaryUnaryMultiCallable[ann_offload_service_pb2.DrainRequest, ann_offload_service_pb2.DrainResponse]

class AnnOffloadServiceServicer(metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def GetStatistics(self, request: ann_offload_service_pb2.GetStatisticsRequest, context: grpc.ServicerContext) -> ann_offload_service_pb2.GetStatisticsResponse: ...
    @abc.abstractmethod
    def Drain(self, request: ann_offload_service_pb2.DrainRequest, context: grpc.ServicerContext) -> ann_offload_service_pb2.DrainResponse: ...

def add_AnnOffloadServiceServicer_to_server(servicer: AnnOffloadServiceServicer, server: grpc.Server) -> None: ...
