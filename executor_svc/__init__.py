"""The device side: obeys plans, decides nothing. Never imports grpc."""
