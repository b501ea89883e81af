"""The gRPC service: its .proto, and the code generated from it by `make proto`."""
