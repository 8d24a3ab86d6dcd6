"""Protocol tests on real sockets."""
