"""The dashboard command: what the workspace shows, what is sent, and one sentence for whatever goes wrong."""

from __future__ import annotations

import copy
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "wandb_workspaces", reason='wandb-workspaces is not installed: pip install "gradiend_dist[dashboard]"'
)

import wandb
from wandb_workspaces.reports.v2.interface import LinePlot
from wandb_workspaces.workspaces import Workspace
from wandb_workspaces.workspaces.internal import View

from gradiend_dist.commands.dashboard import main
from gradiend_dist.tracking import workspace as dashboard
from gradiend_dist.training import monitor as health

# Where each series of metrics.jsonl is drawn over the steps, by (section, panel).
SPEED = "Speed and memory"
DRAWN = {
    "loss": {("Convergence", "Loss")},
    "correlation": {("Convergence", "Correlation")},
    "explained": {("Convergence", "Target explained, and its limit")},
    "explained_limit": {("Convergence", "Target explained, and its limit")},
    "explained_centred": {("Convergence", "Target explained, its mean taken out")},
    "held_out_loss": {("Convergence", "Held-out loss")},
    "grad_norm": {("Convergence", "Gradient norm"), ("Health", "Gradient norm, logarithmic")},
    "learning_rate": {("Convergence", "Learning rate")},
    "encoder_norm": {("Convergence", "Encoder norm")},
    "decoder_norm": {("Convergence", "Decoder norm")},
    "mean_encoding/M": {("Class encodings", "Mean encoding")},
    "mean_encoding/c++ (old)": {("Class encodings", "Mean encoding")},
    "step_seconds": {(SPEED, "Seconds per step")},
    "seconds/data": {(SPEED, "Seconds per step: data")},
    "seconds/base_gradient": {(SPEED, "Seconds per step: base gradient")},
    "seconds/gradiend": {(SPEED, "Seconds per step: gradiend")},
    "seconds/communication": {(SPEED, "Seconds per step: communication")},
    "seconds/evaluation": {(SPEED, "Seconds per step: evaluation")},
    "seconds/save": {(SPEED, "Seconds per step: save")},
    "gradients_per_second": {(SPEED, "Gradients per second")},
    "rows_per_second": {(SPEED, "Rows per second")},
    "memory_gib": {(SPEED, "Memory of the fullest rank, GiB")},
    "gpu_utilisation": {(SPEED, "GPU utilisation, %")},
    "alerts": {("Health", "Alerts")},
}
# Where each number of a run's summary is shown.
SHOWN = {
    "best_seed": ("Seeds", "Best seed"),
    "selection_score": ("Seeds", "Selection score"),
    "best_step": ("Seeds", "Best step"),
    "converged": ("Seeds", "Converged"),
    "convergent_count": ("Seeds", "Converged seeds"),
    "best_correlation": ("Seeds", "Best correlation, with a run for each seed"),
    "explained": ("Seeds", "Target explained, with a run for each seed"),
    "space_size": (SPEED, "Weights that GRADIEND reads"),
    "pruned_size": (SPEED, "Weights after pruning"),
}
LINES, SUMMARIES = "Run History Line Plot", ("Scalar Chart", "Bar Chart")
KEY = "f" * 40
Json = dict[str, Any]


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> Json:
    assert main(["--dry_run", *flags]) == 0
    view: Json = json.loads(capsys.readouterr().out)
    return view


def sections_of(spec: Json) -> list[Json]:
    found: list[Json] = spec["section"]["panelBankConfig"]["sections"]
    return found


def panels_of(spec: Json) -> list[tuple[str, Json]]:
    """Every panel with the name of its section."""
    return [(section["name"], panel) for section in sections_of(spec) for panel in section["panels"]]


def drawn(spec: Json, series: str) -> set[tuple[str, str]]:
    """Section and title of each panel that draws the series, as W&B looks for it."""
    plots = [(section, panel["config"]) for section, panel in panels_of(spec) if panel["viewType"] == LINES]
    assert all(config["useMetricRegex"] and config["metrics"] == [] for _, config in plots)
    return {(section, config["chartTitle"]) for section, config in plots if re.search(config["metricRegex"], series)}


def without_ids(value: Any) -> Any:
    """Panels get new random ids whenever they are made."""
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name not in ("__id__", "id")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


# --- what it shows


def test_sections__come_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    found = sections_of(printed(capsys)["spec"])
    assert [item["name"] for item in found] == ["Convergence", "Seeds", "Class encodings", SPEED, "Health"]
    for item in found:
        room = item["flowConfig"]["columnsPerPage"] * item["flowConfig"]["rowsPerPage"]
        assert item["isOpen"] and len(item["panels"]) <= room, "all panels are on the first page"


def test_lines__draw_each_series_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = printed(capsys)["spec"]
    for prefix in ("", "seed_0/", "seed_12/"):  # a run for each seed, or all seeds in one
        for series, where in DRAWN.items():
            assert drawn(spec, prefix + series) == where, prefix + series
    every = {(section, p["config"]["chartTitle"]) for section, p in panels_of(spec) if p["viewType"] == LINES}
    assert every == set().union(*DRAWN.values()), "no panel is left empty"


@pytest.mark.parametrize(
    "series",
    "step my_loss explained_limits loss/other seed_a/loss seed_/loss x/seed_0/loss seconds/ seconds".split(),
)
def test_lines__leave_other_series_alone(capsys: pytest.CaptureFixture[str], series: str) -> None:
    assert drawn(printed(capsys)["spec"], series) == set()


def test_summaries__have_a_panel_each(capsys: pytest.CaptureFixture[str]) -> None:
    panels = [(name, panel) for name, panel in panels_of(printed(capsys)["spec"]) if panel["viewType"] in SUMMARIES]
    shown = [(panel["config"]["metrics"], (name, panel["config"]["chartTitle"])) for name, panel in panels]
    assert sorted(shown) == sorted(([name], where) for name, where in SHOWN.items())


def test_seeds__show_table_plot_and_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    view = printed(capsys)
    panels = {panel["viewType"]: panel for name, panel in panels_of(view["spec"]) if name == "Seeds"}
    inputs = panels["Weave"]["config"]["panel2Config"]["exp"]["fromOp"]["inputs"]
    assert inputs["key"]["val"] == "seeds"
    assert panels["Media Browser"]["config"]["mediaKeys"] == ["plots/training_convergence"]
    assert "Run Comparer" in panels
    columns = view["spec"]["section"]["runSets"][0]["runFeed"]["columnOrder"]
    assert columns[1:] == ["summary:converged", "summary:best_seed", "summary:selection_score", "summary:best_step"]


def test_x_axis__is_the_step_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    spec = printed(capsys, "--class_names", "M")["spec"]
    axes = [panel["config"]["xAxis"] for _, panel in panels_of(spec) if panel["viewType"] == LINES]
    axes += [item["localPanelSettings"]["xAxis"] for item in sections_of(spec)]
    assert set(axes) == {"step"} and spec["section"]["settings"]["xAxis"] == "step"  # and not _step, which W&B counts


def test_class_names__get_a_panel_each_for_this_class_alone(capsys: pytest.CaptureFixture[str]) -> None:
    spec = printed(capsys, "--class_names", "M", "c++ (old)")["spec"]
    common = ("Class encodings", "Mean encoding")
    for name in ("M", "c++ (old)"):
        assert drawn(spec, f"seed_0/mean_encoding/{name}") == {common, (common[0], f"Mean encoding of {name}")}
    for other in ("MM", "F", "ccc (old)"):
        assert drawn(spec, f"mean_encoding/{other}") == {common}


def test_health__explains_every_alert(capsys: pytest.CaptureFixture[str]) -> None:
    panels = [panel for name, panel in panels_of(printed(capsys)["spec"]) if name == "Health"]
    logarithmic = [p["config"]["chartTitle"] for p in panels if p["config"].get("yLogScale")]
    assert logarithmic == ["Gradient norm, logarithmic"]
    text = next(panel["config"]["value"] for panel in panels if panel["viewType"] == "Markdown Panel")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    kinds = "loss_flat not_finite validation_diverging grad_norm_spike learning_rate_zero low_utilisation".split()
    assert [row[0].strip("`") for row in rows] == kinds
    assert all(len(row) == 3 and all(row) for row in rows)
    assert all(callable(vars(health)[kind]) for kind in kinds if kind != "not_finite"), "they are still called so"


def test_workspace__is_read_back_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    view = printed(capsys, "--class_names", "M", "F", "--entity", "team", "--name", "Ours")
    again = Workspace._from_model(View.model_validate_json(json.dumps(view)))
    assert json.loads(dashboard.as_json(again)) == view
    assert (again.entity, again.project, again.name) == ("team", "gradiend_dist", "Ours")
    plots = [panel for item in again.sections for panel in item.panels if isinstance(panel, LinePlot)]
    assert {plot.x.name for plot in plots} == {"step"} and len(plots) == 25


# --- without network


def test_dry_run__needs_no_network_and_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be connected to or started")

    for name in ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)  # the client talks through a process of its own
    view = printed(capsys, "--url", "https://host/wandb/team/runs/workspace?nw=abc")
    assert (view["entity"], view["project"], view["displayName"]) == ("team", "runs", "GRADIEND training")
    assert printed(capsys)["project"] == "gradiend_dist"


def test_dry_run__takes_entity_and_project_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_PROJECT", "runs")
    assert [printed(capsys)[name] for name in ("entity", "project")] == ["team", "runs"]
    flags = ("--entity", "other", "--project", "mine")
    assert [printed(capsys, *flags)[name] for name in ("entity", "project")] == ["other", "mine"]


def test_library__that_is_missing_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["--dry_run"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and 'pip install "gradiend_dist[dashboard]"' in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "entity is missing: pass --entity"),
        (["--entity", "team/runs"], "entity=team/runs has a slash"),
        (["--entity", "team", "--project", "team/runs"], "project=team/runs has a slash"),
        (["--entity", "team", "--projekt", "runs"], "project"),
        (["runs", "--dry_run"], "'runs' is no flag"),
        (["--dry_run", "--class_names", "M", "F", "M"], "class_names=M F M names a class twice"),
        (["--dry_run", "--name", "loss \N{CHART WITH UPWARDS TREND}"], "name=loss"),
        (["--url", "https://host/team/runs"], "is no saved view"),
        (["--url", "https://host/team?nw=abc"], "is no saved view"),
        (["--url", "team/runs?nw=abc"], "is no saved view"),
        (["--url", "https://host/team/runs?nw=nwuserme"], "is a personal view"),
        (["--url", "https://host/team/runs?nw=abc", "--project", "x"], "leave out --project"),
    ],
)
def test_arguments__that_are_wrong_are_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("gradiend-dist dashboard: error: ") and err.count("\n") == 1
    assert words in err


# --- with a server


class Backend:
    """A W&B server on loopback that keeps views, or answers everything with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.saved: list[Json] = []
        self.views: dict[str, Json] = {}
        self.unknown_entity = "nobody"
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.reply(backend.answer(json.loads(body)) if self.path == "/graphql" else {})

            def reply(self, answer: Json) -> None:
                content = json.dumps(answer).encode()
                self.send_response(backend.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing: pytest shows what matters."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def answer(self, request: Json) -> Json:
        query, variables = request["query"], request.get("variables") or {}
        if self.status != 200:
            return {"errors": [{"message": f"status {self.status} as asked for"}]}
        if "upsertView(" in query:
            if variables["entityName"] == self.unknown_entity:
                return {"data": {"upsertView": None}, "errors": [{"message": "entity not found"}]}
            self.saved.append(variables)
            saved = {"id": variables.get("id", "new-id"), "name": variables["name"]}
            return {"data": {"upsertView": {"view": saved, "inserted": True}}}
        if "allViews(" in query:
            node = self.views.get(variables["viewName"])
            return {"data": {"project": {"allViews": {"edges": [{"node": node}] if node else []}}}}
        viewer = {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"data": {"viewer": viewer}}

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    found = Backend()
    values = {
        "WANDB_BASE_URL": found.url,
        "WANDB_API_KEY": KEY,
        "WANDB_ERROR_REPORTING": "false",  # the client reports its own errors to its makers
        "NETRC": str(tmp_path / "netrc"),
        **{f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")},
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_ENTITY", "WANDB_PROJECT", "WANDB_APP_URL", "WANDB_SERVICE"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # the client reads these once
    yield found
    wandb.teardown()
    found.close()


def saved_view(capsys: pytest.CaptureFixture[str]) -> Json:
    """A view as it is after somebody has worked with it: with a filter, and sections renamed and added."""
    spec = copy.deepcopy(printed(capsys, "--entity", "team")["spec"])
    spec["section"]["runSets"][0]["search"] = {"query": "only these"}
    own = sections_of(spec)[0] | {"name": "My own", "__id__": "mine"}
    own["panels"] = own["panels"][:1]
    spec["section"]["panelBankConfig"]["sections"] = [own, *sections_of(spec)[:2]]
    sections_of(spec)[1]["panels"] = []  # and what was in ours is replaced
    return {"id": "kept-id", "displayName": "Their name", "spec": json.dumps(spec)}


def test_create__sends_the_workspace_that_dry_run_prints(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--entity", "team", "--project", "runs", "--name", "Ours", "--class_names", "M")
    wanted = printed(capsys, *flags)
    assert main(flags) == 0
    out, err = capsys.readouterr()
    (sent,) = backend.saved
    assert (sent["entityName"], sent["projectName"], sent["displayName"]) == ("team", "runs", "Ours")
    assert "id" not in sent and sent["type"] == "project-view"
    assert without_ids(json.loads(sent["spec"])) == without_ids(wanted["spec"])
    view = re.fullmatch(r"nw-(\w+)-v", sent["name"])
    assert view is not None and out == f"{backend.url}/team/runs?nw={view[1]}\n" and err == ""


def test_create__prints_an_address_below_the_path_of_the_server(
    backend: Backend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_APP_URL", "https://app.example/wandb")
    assert main(["--entity", "team"]) == 0
    address = capsys.readouterr().out.strip()
    assert address.startswith("https://app.example/wandb/team/gradiend_dist?nw=")
    view = dashboard.read_url(address)
    assert backend.saved[0]["name"] == f"nw-{view.id}-v" and (view.entity, view.project) == ("team", "gradiend_dist")


def test_update__replaces_our_sections_and_keeps_the_rest(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    backend.views["nw-abc-v"] = saved_view(capsys)
    assert main(["--url", f"{backend.url}/team/runs/workspace?nw=abc"]) == 0
    assert capsys.readouterr().out == f"{backend.url}/team/runs?nw=abc\n"
    (sent,) = backend.saved
    assert (sent["id"], sent["name"], sent["displayName"]) == ("kept-id", "nw-abc-v", "Their name")
    spec = json.loads(sent["spec"])
    wanted = sections_of(printed(capsys)["spec"])
    assert without_ids(sections_of(spec)[:-1]) == without_ids(wanted)
    assert sections_of(spec)[-1]["name"] == "My own" and len(sections_of(spec)[-1]["panels"]) == 1
    assert spec["section"]["runSets"][0]["search"]["query"] == "only these"


def test_update__can_rename(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    backend.views["nw-abc-v"] = saved_view(capsys)
    assert main(["--url", f"{backend.url}/team/runs?nw=abc", "--name", "New name"]) == 0
    assert backend.saved[0]["displayName"] == "New name"


def status(code: int) -> Callable[[Backend, pytest.MonkeyPatch], None]:
    return lambda backend, _: setattr(backend, "status", code)


def no_key(_: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")


def short_key(_: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc")


def nobody_listens(backend: Backend, _: pytest.MonkeyPatch) -> None:
    backend.close()


def nothing(_: Backend, __: pytest.MonkeyPatch) -> None:
    """All is well with the server."""


def unreadable(backend: Backend, _: pytest.MonkeyPatch) -> None:
    backend.views["nw-abc-v"] = {"id": "1", "displayName": "n", "spec": json.dumps({"version": 99})}


URL = ["--url", "https://host/team/runs?nw=abc"]


@pytest.mark.parametrize(
    ("trouble", "flags", "words"),
    [
        (status(401), ["--entity", "team"], ("does not take the key (status 401", "wandb login --relogin")),
        (status(500), ["--entity", "team"], ("does not answer (HTTP 500", "WANDB_BASE_URL")),
        (nobody_listens, ["--entity", "team"], ("does not answer (", "check the network")),
        (no_key, ["--entity", "team"], ("no key for W&B is known here", "WANDB_API_KEY")),
        (short_key, ["--entity", "team"], ("does not take the key (WANDB_API_KEY invalid", "40+")),
        (nothing, ["--entity", "nobody"], ("in nobody/gradiend_dist (", "entity not found", "check both names")),
        (nothing, URL, ("nw=abc cannot be loaded (Workspace `abc` not found", "check the address")),
        (unreadable, URL, ("cannot read", "pip install --upgrade wandb-workspaces")),
    ],
    ids=["401", "500", "refused", "no key", "short key", "unknown entity", "unknown view", "unreadable view"],
)
def test_server__that_says_no_is_one_sentence_with_a_remedy(
    backend: Backend,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[Backend, pytest.MonkeyPatch], None],
    flags: list[str],
    words: tuple[str, ...],
) -> None:
    trouble(backend, monkeypatch)
    assert main(flags) == 1
    out, err = capfd.readouterr()  # of the client's process, too
    assert out == "" and err.startswith("gradiend-dist dashboard: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert KEY not in err and backend.saved == []


def test_settings__that_the_client_does_not_take_are_named(
    backend: Backend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "nonsense")
    assert main(["--entity", "team"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "base_url" in err and "WANDB_ variables" in err and backend.saved == []
