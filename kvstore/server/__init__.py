"""The edge: sessions over the Unix socket and gRPC, both calling the same core."""
