"""What can go wrong because of the world or the user: one tree, so that the CLI and the API translate it in one place.

Knows no exit codes and no HTTP. A bug is not here: it stays an ordinary exception with its traceback.

SquallError
├── ConfigError        a key, a file or a value that the user gave is wrong (CLI: exit 2)
│   ├── TraceError     a workload file, naming file and row
│   ├── ModelError     a model name, a config.json or a checkpoint
│   └── ProfileError   a measured profile
├── RequestError       a client's request is wrong (HTTP 4xx); carries the field and an OpenAI error code
├── Rejected           a good request that cannot be served now or ever (HTTP 429, 503 or 400)
├── TransferFailed     weights or KV did not arrive (loads and migrations end in LoadFailed, KvFailed)
│   ├── PeerLost       the connection broke or the peer fell silent; another may have the same bytes
│   └── PeerRefused    the peer said no: a wrong token, another model, another version
├── ReplicaFailed      a replica died and the request could not be continued (HTTP 500)
│   └── HostLost       the machine that it was to run on cannot be reached; that has been said
└── IllegalTransition  an event that cannot happen in this phase; carries the object's story
"""


class SquallError(Exception):
    """Base of everything that squall raises on purpose. `str()` of it is one line that names the place and the fix."""


class ConfigError(SquallError, ValueError):
    """A key, file or value from the user is wrong. The message names the place, what is wrong and what would be right.

    A ValueError too: raised by a table's own check while msgspec decodes it, it comes out with the table's path.
    """


class TraceError(ConfigError):
    """A workload file cannot be read. The message names the file and, where there is one, the row."""


class ModelError(ConfigError):
    """A model cannot be used: unknown name, unreadable or contradictory config.json, broken checkpoint."""


class ProfileError(ConfigError):
    """A measured profile cannot be used: wrong version, missing operator, another model."""


class RequestError(SquallError):
    """A client's request is wrong; retrying it unchanged cannot help.

    Attributes:
        param: the field that is wrong, if one is.
        code: the OpenAI error code, such as `context_length_exceeded`.
        status: the HTTP status, 400 or 404.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class Rejected(SquallError):
    """A well-formed request that is not served.

    Attributes:
        reason: why, in the words of `squall.core.events.Rejection`.
        retry_after_s: after how many seconds a retry makes sense; None where it never does.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class TransferFailed(SquallError):
    """Bytes did not arrive, and nobody is left to ask. The message names what is missing and what became of each source."""


class PeerLost(TransferFailed):
    """A peer's connection broke, or it was silent for too long. What has arrived stays; another peer may have the rest."""


class PeerRefused(TransferFailed):
    """A peer refused the connection or a request, and will again: wrong token, model, layout or version, or no such region."""


class ReplicaFailed(SquallError):
    """The replica died in the middle of a request, which could not be continued elsewhere."""


class HostLost(ReplicaFailed):
    """No replica can be started there: the host cannot be reached. Whoever found it has told the user, once for all replicas."""


class IllegalTransition(SquallError):
    """An event that cannot happen in this phase: a bug in whoever sent it. Carries the object's story."""
