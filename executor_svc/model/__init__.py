"""The models the executor runs: a config-driven decoder, its weights and its attention.

Nothing here knows of requests, scheduling, sampling or the wire: token ids and block tables in, logits out.
"""
