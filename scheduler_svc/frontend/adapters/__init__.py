"""Other people's gRPC interfaces over the one internal request, so that existing gateways work unmodified.

    vllm.grpc.engine.VllmEngine     engine.py, of the smg gateway
    vllm.Inference, vllm.Control    inference.py, control.py, of vllm-router

Each adapter translates its request into ours, lets InferenceService run it, and translates our messages back. Nothing
is decided here: bounds, defaults, statuses, limits and names are InferenceService's, whatever way a request came.
"""
