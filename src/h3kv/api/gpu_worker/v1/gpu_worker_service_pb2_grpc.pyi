# Written by tools/genproto.py from proto/h3kv/api/gpu_worker/v1/gpu_worker_service.proto. Do not edit: run `make proto`.
import abc
from collections.abc import Iterator

import grpc

from h3kv.api.gpu_worker.v1 import gpu_worker_service_pb2

class GpuWorkerServiceStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Generate: grpc.UnaryStreamMultiCallable[gpu_worker_service_pb2.GenerateRequest, gpu_worker_service_pb2.GenerateResponse]
    Admit: grpc.UnaryStreamMultiCallable[gpu_worker_service_pb2.AdmitRequest, gpu_worker_service_pb2.AdmitResponse]
    Tokenize: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.TokenizeRequest, gpu_worker_service_pb2.TokenizeResponse]
    GetModel: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.GetModelRequest, gpu_worker_service_pb2.GetModelResponse]
    GetStatistics: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.GetStatisticsRequest, gpu_worker_service_pb2.GetStatisticsResponse]
    Promote: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.PromoteRequest, gpu_worker_service_pb2.PromoteResponse]
    Demote: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.DemoteRequest, gpu_worker_service_pb2.DemoteResponse]
    EvictCold: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.EvictColdRequest, gpu_worker_service_pb2.EvictColdResponse]
    CreateDocument: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.CreateDocumentRequest, gpu_worker_service_pb2.CreateDocumentResponse]
    GetDocument: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.GetDocumentRequest, gpu_worker_service_pb2.GetDocumentResponse]
    ListDocuments: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.ListDocumentsRequest, gpu_worker_service_pb2.ListDocumentsResponse]
    UpdateDocument: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.UpdateDocumentRequest, gpu_worker_service_pb2.UpdateDocumentResponse]
    DeleteDocument: grpc.UnaryUnaryMultiCallable[gpu_worker_service_pb2.DeleteDocumentRequest, gpu_worker_service_pb2.DeleteDocumentResponse]

class GpuWorkerServiceServicer(metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def Generate(self, request: gpu_worker_service_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[gpu_worker_service_pb2.GenerateResponse]: ...
    @abc.abstractmethod
    def Admit(self, request: gpu_worker_service_pb2.AdmitRequest, context: grpc.ServicerContext) -> Iterator[gpu_worker_service_pb2.AdmitResponse]: ...
    @abc.abstractmethod
    def Tokenize(self, request: gpu_worker_service_pb2.TokenizeRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.TokenizeResponse: ...
    @abc.abstractmethod
    def GetModel(self, request: gpu_worker_service_pb2.GetModelRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.GetModelResponse: ...
    @abc.abstractmethod
    def GetStatistics(self, request: gpu_worker_service_pb2.GetStatisticsRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.GetStatisticsResponse: ...
    @abc.abstractmethod
    def Promote(self, request: gpu_worker_service_pb2.PromoteRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.PromoteResponse: ...
    @abc.abstractmethod
    def Demote(self, request: gpu_worker_service_pb2.DemoteRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.DemoteResponse: ...
    @abc.abstractmethod
    def EvictCold(self, request: gpu_worker_service_pb2.EvictColdRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.EvictColdResponse: ...
    @abc.abstractmethod
    def CreateDocument(self, request: gpu_worker_service_pb2.CreateDocumentRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.CreateDocumentResponse: ...
    @abc.abstractmethod
    def GetDocument(self, request: gpu_worker_service_pb2.GetDocumentRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.GetDocumentResponse: ...
    @abc.abstractmethod
    def ListDocuments(self, request: gpu_worker_service_pb2.ListDocumentsRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.ListDocumentsResponse: ...
    @abc.abstractmethod
    def UpdateDocument(self, request: gpu_worker_service_pb2.UpdateDocumentRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.UpdateDocumentResponse: ...
    @abc.abstractmethod
    def DeleteDocument(self, request: gpu_worker_service_pb2.DeleteDocumentRequest, context: grpc.ServicerContext) -> gpu_worker_service_pb2.DeleteDocumentResponse: ...

def add_GpuWorkerServiceServicer_to_server(servicer: GpuWorkerServiceServicer, server: grpc.Server) -> None: ...
