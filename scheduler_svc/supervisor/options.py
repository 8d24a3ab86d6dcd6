"""The options of `stepwire serve` as one table: the command's signature, the environment's names and what is passed on
to which child are all read from it. It knows nothing of where a value came from.

`parts` names the children that take the option under the same name; serve passes on only what the operator set, so that
each service's own defaults stay the only truth about defaults.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.errors import StartupError

EXECUTOR = "executor"
SCHEDULER = "scheduler"
FRONTEND = "frontend"

SIZE = re.compile(r"\d+(\.\d+)?\s*([kmgt]i?)?b?", re.IGNORECASE)
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Option:
    name: str  # as on the command line, without the dashes
    kind: str  # text int float size file flag, or the choices joined by |
    help: str
    default: str = ""  # for the help text only
    low: float = -math.inf
    high: float = math.inf
    parts: tuple[str, ...] = ()
    short: str = ""  # a letter
    in_service: bool = True  # False: the name is agreed, no service of this version has it, setting it is refused

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "STEPWIRE_" + self.key.upper()

    @property
    def off_name(self) -> str:
        """The other side of a flag: --enable-x / --no-x."""
        return "no-" + self.name.removeprefix("enable-")

    def parse(self, text: str, source: str) -> Value:
        """The value in its own type; `source` is how the operator named it (an option or a variable)."""
        if not self.in_service:
            raise StartupError(f"{source} is not in this version: leave it out")
        if "|" in self.kind:
            return self._choice(text, source)
        match self.kind:
            case "int" | "float":
                return self._number(text, source)
            case "flag":
                return self._flag(text, source)
            case "size" if not SIZE.fullmatch(text.strip()):
                raise StartupError(f"{source} {text!r} is not a size: write bytes or a number with a unit, as in 4GiB")
            case "file" if not Path(text).is_file():
                raise StartupError(f"{source} {text!r} is not a file that can be read")
            case _ if not text.strip():
                raise StartupError(f"{source} is empty: give it a value or leave it out")
        return text

    def arguments(self, value: Value) -> list[str]:
        """The command line that hands `value` on."""
        if self.kind == "flag":
            return [f"--{self.name if value else self.off_name}"]
        return [f"--{self.name}", str(value)]

    def _choice(self, text: str, source: str) -> str:
        if text not in self.kind.split("|"):
            raise StartupError(f"{source} {text!r} is not one of {self.kind.replace('|', ', ')}")
        return text

    def _flag(self, text: str, source: str) -> bool:
        if text.lower() not in TRUE + FALSE:
            raise StartupError(f"{source} {text!r} is not one of {', '.join(TRUE + FALSE)}")
        return text.lower() in TRUE

    def _number(self, text: str, source: str) -> int | float:
        try:
            value = int(text) if self.kind == "int" else float(text)
        except ValueError:
            kind = "a whole number" if self.kind == "int" else "a number"
            raise StartupError(f"{source} {text!r} is not {kind}") from None
        if not self.low <= value <= self.high or math.isinf(value):
            raise StartupError(f"{source} {text} is out of range: {self.low} to {self.high}")
        return value


def _executor(
    name: str, kind: str, help: str, default: str = "", *, low: float = -math.inf, high: float = math.inf
) -> Option:
    return Option(name, kind, help, default, low, high, parts=(EXECUTOR,))


def _scheduler(name: str, kind: str, help: str, default: str, *, low: float, high: float) -> Option:
    return Option(name, kind, help, default, low, high, parts=(SCHEDULER,))


OPTIONS: tuple[Option, ...] = (
    Option("model", "text", "A directory, a .gguf file or a hub id.", "SmolLM2-135M-Instruct"),
    Option("served-model-name", "text", "What clients call the model.", "the model's own name"),
    Option("host", "text", "Address that the frontends listen on.", "127.0.0.1"),
    Option("port", "int", "Port of the first frontend; the others count up. 0: any free one.", "50051", 0, 65535),
    Option("frontends", "int", "How many frontends.", "1", 1, 64),
    Option("executors", "int", "One computes; the others have loaded the weights and take over at once.", "1", 1, 8),
    _executor("backend", "auto|cuda|cpu|simulated", "What computes.", "auto"),
    _executor("dtype", "auto|bfloat16|float16|float32|int8", "Type of the weights.", "auto"),
    _executor("kv-dtype", "auto|fp8|int8", "Type of the KV cache.", "auto"),
    _executor("block-size", "int", "Tokens per KV block.", "16", low=1, high=1024),
    _executor("num-blocks", "int", "KV blocks; overrides the measured number.", "measured", low=1, high=2**24),
    _executor("kv-memory", "size", "Memory for the KV cache, as in 4GiB.", "measured"),
    Option(
        "gpu-memory-utilization",
        "float",
        "Share of the device's memory to use.",
        "0.9",
        0.05,
        1,
        parts=(EXECUTOR,),
    ),
    _executor("max-model-len", "int", "Longest sequence, prompt and output.", "the model's", low=2, high=2**24),
    _executor("max-num-seqs", "int", "Sequences that run at once.", "by backend", low=1, high=2**14),
    _executor("max-num-batched-tokens", "int", "Tokens computed in one step.", "by backend", low=1, high=2**20),
    Option("max-waiting", "int", "Requests that may queue.", "1024", 1, 1_000_000, parts=(SCHEDULER,)),
    _scheduler("max-waiting-tokens", "int", "Prompt tokens that may queue.", "4000000", low=1, high=2**40),
    _scheduler("max-waiting-per-tenant", "int", "Requests of one tenant that may queue.", "off", low=1, high=1_000_000),
    _scheduler("max-waiting-tokens-per-tenant", "int", "The same in prompt tokens.", "off", low=1, high=2**40),
    _scheduler(
        *("max-wait", "float", "Seconds; who would wait longer for its turn, as predicted, is refused.", "off"),
        low=0.001,
        high=86_400,
    ),
    _scheduler(
        *("inter-token-target", "float", "Seconds, as 0.05; steps are kept so short while streams run.", "off"),
        low=0.001,
        high=60,
    ),
    Option("policy", "fcfs|priority|fair", "Who is admitted first.", "fcfs", parts=(SCHEDULER,)),
    Option("pipeline-depth", "int", "Plans in flight; 1 is for debugging.", "2", 1, 2, parts=(SCHEDULER,)),
    Option("enable-prefix-caching", "flag", "Share KV of equal prefixes.", "on", parts=(SCHEDULER,)),
    Option(
        "drain-timeout",
        "float",
        "Seconds that streams get to finish at the end.",
        "30",
        0,
        86400,
        parts=(FRONTEND, SCHEDULER),
    ),
    Option(
        "max-executor-deaths",
        "int",
        "Executors that a request may take with it, the last one alone, before it ends with INTERNAL.",
        "4",
        3,
        100,
        parts=(SCHEDULER,),
    ),
    Option(
        "restart-limit", "int", "Restarts of one child within the window; one more ends the service.", "20", 0, 1000
    ),
    Option("restart-window", "float", "Seconds over which restarts are counted.", "600", 0.1, 86400),
    Option("silence-limit", "float", "Seconds without a sign of life until a child is killed.", "10", 0.5, 3600),
    Option("tls-cert", "file", "Certificate chain (PEM) of the frontends.", parts=(FRONTEND,)),
    Option("tls-key", "file", "Private key (PEM) of the frontends.", parts=(FRONTEND,)),
    Option("tls-client-ca", "file", "Clients must show a certificate that this CA (PEM) signed.", parts=(FRONTEND,)),
    Option("api-keys", "file", "File with the keys that clients may use; see `stepwire keys`.", parts=(FRONTEND,)),
    Option("metrics-port", "int", "Port of the Prometheus endpoint. 0: any free one.", "9464", 0, 65535),
    Option("journal", "text", "Write what the core is told, and digests of its plans, to FILE.", parts=(SCHEDULER,)),
    Option(
        "journal-limit", "int", "MiB of the journal and of FILE.1, the part before it.", "256", 1, 2**20, (SCHEDULER,)
    ),
    Option(
        "journal-unmasked",
        "flag",
        "Token ids, tenants and salts as they are: who has the file can read prompts.",
        "off",
        parts=(SCHEDULER,),
    ),
    Option(
        "log-format",
        "text|json",
        "json: one object a line, of every service.",
        "text",
        parts=(SCHEDULER, EXECUTOR, FRONTEND),
    ),
    Option(
        "trace-endpoint",
        "text",
        "OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318.",
        "off",
        parts=(SCHEDULER, EXECUTOR, FRONTEND),
    ),
    Option("ready-file", "text", "Written once the service answers: addresses and pids, as JSON."),
    Option("verbose", "flag", "Show every line that the services log; -v for short.", "off", short="v"),
)
