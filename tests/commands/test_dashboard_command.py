"""The command, against a server of W&B's interface that listens on this machine."""

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb

from lightning_dct.callbacks.wandb_runs import sections
from lightning_dct.commands import main

KEY = "x" * 40


class Server(ThreadingHTTPServer):
    """Answers what the command asks, of one project, and keeps the dashboards that are saved."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.saved: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "upsertView" in query:
            self.saved.append(variables)
            return {
                "upsertView": {"view": {"id": "view", "name": variables["name"]}, "inserted": True}
            }
        if "project(" in query:
            known = (variables["entity"], variables["name"]) in {("me", "runs"), ("team", "runs")}
            project = {
                "__typename": "Project",
                "id": "p",
                "name": variables["name"],
                "entityName": "me",
            }
            return {
                "project": {
                    **project,
                    "createdAt": "2026-01-01",
                    "isBenchmark": False,
                    "user": None,
                }
                if known
                else None
            }
        assert "viewer" in query, query
        return {
            "viewer": {
                "id": "u",
                "entity": "me",
                "username": "me",
                "flags": "{}",
                "teams": {"edges": []},
            }
        }


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {}
        if self.path == "/graphql":  # and not W&B's account of how it is used
            asked = json.loads(body)
            answer = {"data": self.server.answer(asked["query"], asked.get("variables") or {})}
        written = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(written)))
        self.end_headers()
        self.wfile.write(written)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody is logged in to W&B."""
    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        wandb.teardown()
        server.shutdown()


@pytest.fixture
def logged_in(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.saved.clear()
    return server


def names(spec: dict[str, Any]) -> list[str]:
    return [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]


def test_pushes_all_sections_and_prints_where(
    logged_in: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["dashboard", "--project", "runs", "--name", "Traffic", "--quality", "val_loss", "auc"]
        )
        == 0
    )
    (view,) = logged_in.saved
    assert {key: view[key] for key in ("entityName", "projectName", "displayName", "type")} == {
        "entityName": "me",  # whoever is logged in
        "projectName": "runs",
        "displayName": "Traffic",
        "type": "project-view",
    }
    assert (
        capsys.readouterr().out
        == f"{logged_in.url}/me/runs?nw={view['name'].removeprefix('nw-').removesuffix('-v')}\n"
    )
    spec = json.loads(view["spec"])
    assert names(spec) == list(sections())
    quality = spec["section"]["panelBankConfig"]["sections"][0]["panels"]
    assert [panel["config"].get("metrics") for panel in quality] == [["val_loss"], ["auc"], None]
    assert quality[2]["config"]["yAxis"] == "summary:auc"
    grouping = [(key["section"], key["name"]) for key in spec["section"]["runSets"][0]["grouping"]]
    assert grouping == [
        ("config", f"lightning_dct.value.{setting}")
        for setting in ("strategy", "density", "value_format")
    ]


def test_environment_says_where(
    logged_in: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_PROJECT", "runs")
    assert main(["dashboard"]) == 0
    assert [(view["entityName"], view["projectName"]) for view in logged_in.saved] == [
        ("team", "runs")
    ]
    assert "/team/runs?" in capsys.readouterr().out


def test_output_needs_no_network_and_no_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    one = tmp_path / "one.json"
    other = tmp_path / "other.json"
    for file in (one, other):
        assert (
            main(["dashboard", "--project", "runs", "--entity", "team", "--output", str(file)]) == 0
        )
    assert one.read_text() == other.read_text()
    view = json.loads(one.read_text())
    assert (view["entity"], view["project"], view["displayName"]) == (
        "team",
        "runs",
        "lightning_dct",
    )
    assert names(view["spec"]) == list(sections())
    assert capsys.readouterr().out == f"{one}\n{other}\n"


def test_a_dashboard_replaces_a_dashboard_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: one line that names the argument, and what was there is there still."""
    checkpoint, settings, empty, own = (
        tmp_path / name for name in ("x.ckpt", "settings.json", "empty", "own.json")
    )
    kept = {checkpoint: b"PK\x03\x04 weights", settings: b'{\n  "density": 0.03\n}\n'}
    for file, content in kept.items():
        file.write_bytes(content)
    for output in (*kept, tmp_path, tmp_path / "nowhere" / "own.json", checkpoint / "own.json"):
        assert main(["dashboard", "--project", "runs", "--output", str(output)]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"lightning-dct dashboard: --output {output}: ")
        assert told.count("\n") == 1
    assert {file: file.read_bytes() for file in kept} == kept
    empty.touch()
    for output in (empty, own, own):
        assert main(["dashboard", "--project", "runs", "--output", str(output)]) == 0
    own.write_text(json.dumps(json.loads(own.read_text())))  # as a formatter may leave it
    assert main(["dashboard", "--project", "runs", "--output", str(own)]) == 0
    assert own.read_text() == empty.read_text()


def test_unknown_project(logged_in: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--project", "ruins"]) == 1
    told = capsys.readouterr().err
    assert "no project 'ruins' of the entity 'me'" in told
    assert "`--project`" in told
    assert not logged_in.saved


def test_not_logged_in(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    wandb.teardown()  # it remembers the key of an earlier test
    assert main(["dashboard", "--project", "runs"]) == 1
    told = capsys.readouterr().err
    assert "`wandb login`" in told
    assert "WANDB_API_KEY" in told


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: an error of the kind that misuse has, where no user can cause it."""

    def fail(*_: Any) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("lightning_dct.commands.make_workspace", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["dashboard", "--project", "runs", "--output", "never-written.json"])


def test_no_project(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 1
    assert "`--project`" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["wandb", "wandb_workspaces"])
def test_missing_extra(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("wandb_workspaces", f"{package}."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["dashboard", "--project", "runs", "--output", "never-written.json"]) == 1
    assert "pip install '.[experiments]' in a clone of lightning_dct" in capsys.readouterr().err
