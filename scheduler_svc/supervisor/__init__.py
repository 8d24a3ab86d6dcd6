"""`stepwire serve`: one scheduler, one executor and N frontends on this host, started, watched, restarted and drained.

The supervisor knows processes, not requests: it never looks inside a frame or a stream. A child tells it two things
only: "I answer" (its ready file appears) and "I am gone" (it exited). What a restart means for the streams is the
business of the tiers themselves.

Reading order: options (the table) · config (the table filled in) · restart (when to try again) · child (one process) ·
supervisor (all of them) · serve (the command).
"""
