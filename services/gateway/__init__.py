"""The node's door for HTTP: speaks OpenAI's API outside and gRPC inside."""
