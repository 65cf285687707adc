# Written by tools/genproto.py from proto/h3kv/api/migration_controller/v1/migration_controller_service.proto. Do not edit: run `make proto`.
import abc
from collections.abc import Iterator

import grpc

from h3kv.api.migration_controller.v1 import migration_controller_service_pb2

class MigrationControllerServiceStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    ReportTelemetry: grpc.StreamUnaryMultiCallable[migration_controller_service_pb2.ReportTelemetryRequest, migration_controller_service_pb2.ReportTelemetryResponse]
    GetView: grpc.UnaryUnaryMultiCallable[migration_controller_service_pb2.GetViewRequest, migration_controller_service_pb2.GetViewResponse]
    GetDecisions: grpc.UnaryUnaryMultiCallable[migration_controller_service_pb2.GetDecisionsRequest, migration_controller_service_pb2.GetDecisionsResponse]

class MigrationControllerServiceServicer(metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def ReportTelemetry(self, request_iterator: Iterator[migration_controller_service_pb2.ReportTelemetryRequest], context: grpc.ServicerContext) -> migration_controller_service_pb2.ReportTelemetryResponse: ...
    @abc.abstractmethod
    def GetView(self, request: migration_controller_service_pb2.GetViewRequest, context: grpc.ServicerContext) -> migration_controller_service_pb2.GetViewResponse: ...
    @abc.abstractmethod
    def GetDecisions(self, request: migration_controller_service_pb2.GetDecisionsRequest, context: grpc.ServicerContext) -> migration_controller_service_pb2.GetDecisionsResponse: ...

def add_MigrationControllerServiceServicer_to_server(servicer: MigrationControllerServiceServicer, server: grpc.Server) -> None: ...
