"""Capacity planning: how many users fit and are served in time. Arithmetic, and the real core in virtual time.

Imports no torch, no grpc and no sockets: what a step costs is given to it.
"""
