# Written by tools/genproto.py from proto/h3kv/api/nvme_io/v1/nvme_io_service.proto. Do not edit: run `make proto`.
import abc
from collections.abc import Iterator

import grpc

from h3kv.api.nvme_io.v1 import nvme_io_service_pb2

class NvmeIoServiceStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Register: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.RegisterRequest, nvme_io_service_pb2.RegisterResponse]
    LeaseUnits: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.LeaseUnitsRequest, nvme_io_service_pb2.LeaseUnitsResponse]
    ReturnUnits: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.ReturnUnitsRequest, nvme_io_service_pb2.ReturnUnitsResponse]
    ListStored: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.ListStoredRequest, nvme_io_service_pb2.ListStoredResponse]
    GetStatistics: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.GetStatisticsRequest, nvme_io_service_pb2.GetStatisticsResponse]
    Promote: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.PromoteRequest, nvme_io_service_pb2.PromoteResponse]
    Demote: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.DemoteRequest, nvme_io_service_pb2.DemoteResponse]
    EvictCold: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.EvictColdRequest, nvme_io_service_pb2.EvictColdResponse]
    WatchMoves: grpc.UnaryStreamMultiCallable[nvme_io_service_pb2.WatchMovesRequest, nvme_io_service_pb2.WatchMovesResponse]
    ReportOutcome: grpc.UnaryUnaryMultiCallable[nvme_io_service_pb2.ReportOutcomeRequest, nvme_io_service_pb2.ReportOutcomeResponse]

class NvmeIoServiceServicer(metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def Register(self, request: nvme_io_service_pb2.RegisterRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.RegisterResponse: ...
    @abc.abstractmethod
    def LeaseUnits(self, request: nvme_io_service_pb2.LeaseUnitsRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.LeaseUnitsResponse: ...
    @abc.abstractmethod
    def ReturnUnits(self, request: nvme_io_service_pb2.ReturnUnitsRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.ReturnUnitsResponse: ...
    @abc.abstractmethod
    def ListStored(self, request: nvme_io_service_pb2.ListStoredRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.ListStoredResponse: ...
    @abc.abstractmethod
    def GetStatistics(self, request: nvme_io_service_pb2.GetStatisticsRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.GetStatisticsResponse: ...
    @abc.abstractmethod
    def Promote(self, request: nvme_io_service_pb2.PromoteRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.PromoteResponse: ...
    @abc.abstractmethod
    def Demote(self, request: nvme_io_service_pb2.DemoteRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.DemoteResponse: ...
    @abc.abstractmethod
    def EvictCold(self, request: nvme_io_service_pb2.EvictColdRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.EvictColdResponse: ...
    @abc.abstractmethod
    def WatchMoves(self, request: nvme_io_service_pb2.WatchMovesRequest, context: grpc.ServicerContext) -> Iterator[nvme_io_service_pb2.WatchMovesResponse]: ...
    @abc.abstractmethod
    def ReportOutcome(self, request: nvme_io_service_pb2.ReportOutcomeRequest, context: grpc.ServicerContext) -> nvme_io_service_pb2.ReportOutcomeResponse: ...

def add_NvmeIoServiceServicer_to_server(servicer: NvmeIoServiceServicer, server: grpc.Server) -> None: ...
