"""The CPU side: plans every step, serves every client. Never imports torch."""
