"""The processes of a node: one package each, which meet over gRPC and shared memory alone."""
