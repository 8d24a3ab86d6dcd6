"""`stepwire keys`: API keys for clients, CURVE keys for services. An API key is shown once, when it is made."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.errors import StartupError

keys = typer.Typer(help="API keys of clients, CURVE keys of services.", no_args_is_help=True)
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="What --api-keys of serve or a frontend names.")]


@keys.command()
def make(
    file: KeyFile,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose it is: fairness and cached prompts are by tenant.")],
) -> None:
    """Make an API key; print it, once. The file keeps only its hash.

    Running frontends know it at their next call. A tenant may have several keys.
    """
    from datetime import UTC, datetime

    from scheduler_svc.frontend.api_keys import add, make_key

    key, entry = make_key(tenant, f"made {datetime.now(UTC):%Y-%m-%d}")
    add(file, entry)
    print(f"key {entry.key_id} of {tenant} is in {file}; it is not shown again:", file=sys.stderr)
    print(key)


@keys.command(name="list")
def list_keys(file: KeyFile) -> None:
    """The keys in a file: id, tenant, comment."""
    from scheduler_svc.frontend.api_keys import read

    for entry in read(file):
        print(f"{entry.key_id}  {entry.tenant}  {entry.comment}".rstrip())


@keys.command()
def revoke(
    file: KeyFile, key_id: Annotated[str, typer.Argument(metavar="ID", help="As `stepwire keys list` shows it.")]
) -> None:
    """Take a key away. Calls with it are refused from then on; streams that run may finish."""
    from scheduler_svc.frontend.api_keys import remove

    print(f"key {key_id} of {remove(file, key_id).tenant} is revoked", file=sys.stderr)


@keys.command()
def curve(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="One service each.")] = None,
) -> None:
    """Make CURVE key pairs for services on different hosts. Default names: scheduler, frontend, executor.

    NAME.key_secret goes to that service alone (--curve-secret), scheduler.key to all others (--curve-server), and the
    directory `clients` to the scheduler (--curve-clients): who has a public key in it may connect.
    """
    from scheduler_svc.links.curve import make_certificates

    wanted = names or ["scheduler", "frontend", "executor"]
    if bad := [name for name in wanted if not name.replace("-", "").replace("_", "").isalnum()]:
        raise StartupError(f"{bad[0]!r} is no name for a key: use letters, digits, dashes and underscores")
    for path in make_certificates(directory, wanted):
        print(path)
