"""`flotilla drafters`: the pool of a running server seen and changed (docs/drafter-pool.md)."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import typer

from deployments.api_keys import KEY_SENT, client_headers
from deployments.command_failure import fail
from deployments.server_call import open_server
from deployments.server_url import server_root

app = typer.Typer(help="See and change the drafters of a running server.", no_args_is_help=True)

UrlOption = Annotated[str, typer.Option(help="The server, which must have `http: {admin: true}`.")]
_URL = "http://127.0.0.1:8000"
# Adding waits for the drafter to be loaded.
_TIMEOUT_S = 120.0


@app.command("list")
def list_drafters(
    url: UrlOption = _URL,
    as_json: Annotated[bool, typer.Option("--json", help="As the server tells it.")] = False,
) -> None:
    """Every instance: state, load, restarts, node."""
    _show(_call(url, "GET", ""), as_json=as_json)


@app.command()
def add(
    file: Annotated[
        Path | None, typer.Argument(help="YAML or JSON of one drafter, as in the configuration.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name.")] = None,
    path: Annotated[
        str | None, typer.Option(help="Directory of its model on the server, or zoo:NAME.")
    ] = None,
    replicas: Annotated[int | None, typer.Option(min=1, max=64, help="Instances.")] = None,
    num_gpus: Annotated[
        float | None, typer.Option(min=0, help="Ray GPUs per instance, 0.5 for half.")
    ] = None,
    url: UrlOption = _URL,
) -> None:
    """Add a drafter: from a file, or a model drafter by --name and --path."""
    drafter: dict[str, Any] = {"kind": "model"}
    if file is not None:
        drafter = _read(file)
    elif name is None or path is None:
        fail("which drafter? Give a file, or --name and --path")
    given = {"name": name, "path": path, "replicas": replicas}
    drafter |= {field: value for field, value in given.items() if value is not None}
    if num_gpus is not None:
        drafter["placement"] = {**drafter.get("placement", {}), "num_gpus": num_gpus}
    _show(_call(url, "POST", "", drafter))


@app.command()
def replace(
    file: Annotated[Path, typer.Argument(help="YAML or JSON of the drafter as it is to be.")],
    url: UrlOption = _URL,
) -> None:
    """Give a drafter other weights or settings: the new instances are loaded, then the old ones drained."""
    drafter = _read(file)
    if "name" not in drafter:
        fail(f"{file} does not say which drafter: give its `name`")
    _show(_call(url, "PUT", f"/{urllib.parse.quote(str(drafter['name']), safe='')}", drafter))


@app.command()
def scale(
    kind: Annotated[str, typer.Argument(help="Name in the configuration.")],
    replicas: Annotated[int, typer.Argument(min=1, max=64, help="Instances.")],
    url: UrlOption = _URL,
) -> None:
    """Have so many instances of a drafter; those too many are drained."""
    _show(_call(url, "PATCH", f"/{urllib.parse.quote(kind, safe='')}", {"replicas": replicas}))


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Of an instance, or of a kind for all of its instances.")],
    drain: Annotated[
        bool, typer.Option(help="Let it finish what it drafts for; --no-drain is at once.")
    ] = True,
    url: UrlOption = _URL,
) -> None:
    """Remove a drafter; no request notices but by its speed."""
    answer = _call(url, "DELETE", f"/{urllib.parse.quote(name)}?drain={str(drain).lower()}")
    # One that was still loading has nothing to finish, and is gone at once.
    left = [one for one in answer["data"] if one["state"] == "draining"] if drain else []
    typer.echo(f"{name} is {'draining' if left else 'gone'}")
    if left:
        _show({"data": left})


def _read(file: Path) -> dict[str, Any]:
    import yaml

    from cluster.strict_yaml import load_yaml

    try:
        drafter = load_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"cannot read {file}: {error}")
    if not isinstance(drafter, dict):
        fail(f"{file} is no drafter: it must have fields, such as `kind` and `name`")
    return drafter


def _call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The server's answer; ends the command with its message if it refuses."""
    data = None if body is None else json.dumps(body).encode()
    headers = client_headers() | ({} if data is None else {"Content-Type": "application/json"})
    try:
        request = urllib.request.Request(
            f"{server_root(url)}/admin/drafters{path}", data=data, headers=headers, method=method
        )
        with open_server(request, _TIMEOUT_S) as response:
            answer: Any = json.load(response)
    except urllib.error.HTTPError as error:
        try:
            told = str(json.load(error)["error"]["message"])
            fail(told + (f" {KEY_SENT}" if error.code == 401 else ""))
        except (ValueError, KeyError, TypeError):
            fail(f"{url} answers {error.code} {error.reason}")
    except (OSError, ValueError) as error:
        fail(f"{url} does not answer: {getattr(error, 'reason', error)}")
    except HTTPException as error:  # another protocol, or an answer that breaks off
        fail(f"{url} does not answer: {error!r}")
    if not isinstance(answer, dict) or "object" not in answer:
        fail(f"{url} answers as no Flotilla server does; is it another one's?")
    return answer


def _show(answer: dict[str, Any], *, as_json: bool = False) -> None:
    if as_json:
        typer.echo(json.dumps(answer, indent=1))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("drafter", "state", "load", "restarts", "recovery", "node", "costs"):
        table.add_column(heading, no_wrap=heading != "costs")
    for one in answer["data"]:
        recovery = "" if one["recovery_s"] is None else f"{one['recovery_s']:.1f} s"
        load = f"{one['load']} of {one['max_requests']}"
        state = one["state"] if not one["waits_for"] else f"{one['state']} *"
        name = escape(one["name"])
        table.add_row(name, state, load, str(one["restarts"]), recovery, one["node"][:8], one["costs"])
    console = Console(highlight=False)
    console.print(table)
    for one in answer["data"]:
        if one["waits_for"]:
            console.print(f"* {one['name']}: {one['waits_for']}", markup=False)
