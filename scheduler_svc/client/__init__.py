"""The command line's gRPC clients: a streamed completion, a conversation, a health check. Knows the public API only."""
