"""The ZeroMQ links: the only modules of the scheduler package that import zmq.

transport.py   sockets with every option set, lock files, decoding within limits
messages.py    wire messages <-> values of the core (pure)
frontends.py   the scheduler's side of many frontends: sessions, leases, one frame per step
executors.py   the scheduler's side of executors: who serves, its epoch, its heartbeat
budget.py      how long a step may take (pure)
session.py     the frontend's side: one session that outlives schedulers
streams.py     the frontend's side: one stream per request (no sockets)
"""

# 2: an executor's hello names the epoch it has known, its faults have a kind. A peer of the version before is served.
PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 1


def versions_differ(newest: int, oldest: int) -> str:
    """Why a peer that speaks `oldest`..`newest` cannot be talked to; empty: it can."""
    if max(oldest, OLDEST_PROTOCOL_VERSION) <= min(newest, PROTOCOL_VERSION):
        return ""
    return (
        f"protocol mismatch: the scheduler speaks versions {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, "
        f"the peer {oldest} to {newest}"
    )
