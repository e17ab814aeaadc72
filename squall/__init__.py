"""squall: serve large language models through sudden load, and rehearse it first."""

__version__ = "0.1.0"
