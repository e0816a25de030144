"""The dashboard command: a W&B workspace that shows the series of training runs, written as code.

gradiend-dist dashboard --entity TEAM --project gradiend_dist
gradiend-dist dashboard --url 'https://.../TEAM/gradiend_dist?nw=a0b1c2d3'
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from gradiend_dist.config.checks import require
from gradiend_dist.config.fields import documented
from gradiend_dist.distributed.clock import SECTIONS
from gradiend_dist.errors import UserError
from gradiend_dist.tracking.alerts import alert_table

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2.interface import LinePlot, PanelTypes
    from wandb_workspaces.workspaces import Section, Workspace

NAME = "GRADIEND training"

PROJECT = "gradiend_dist"

X_AXIS = "step"

COLUMNS = 3

# All seeds as series of one run, or a run for each seed without the prefix: one panel shows both.
ANY_SEED = r"^(seed_\d+/)?"


class ServerError(RuntimeError):
    """W&B cannot be reached or says no: one sentence with the remedy, and exit code 1."""


@documented
@dataclass(kw_only=True)
class DashboardOptions:
    """Which workspace, and what it shows."""

    entity: str | None = None
    """User or team that owns the project. None: WANDB_ENTITY."""
    project: str | None = None
    """Project of the runs. None: WANDB_PROJECT, or gradiend_dist."""
    name: str | None = None
    """Name of the workspace. None: GRADIEND training, or with url the one it has."""
    url: str | None = None
    """Update this saved view. None: create one."""
    class_names: list[str] | None = None
    """Classes that get a panel of their own besides the common one."""
    dry_run: bool = False
    """Print the workspace as JSON and send nothing."""


@dataclass(frozen=True)
class View:
    """Where a workspace is or will be."""

    entity: str
    project: str
    id: str | None = None
    """What the address has after `nw=`; None before it is saved."""


def view_of(options: DashboardOptions) -> View:
    """The view that --url names, or a new one."""
    if options.url is not None:
        given = [name for name in ("entity", "project") if vars(options)[name] is not None]
        require(not given, f"url names entity and project already: leave out --{' and --'.join(given)}.")
        return read_url(options.url)
    entity = options.entity or os.environ.get("WANDB_ENTITY", "")
    project = options.project or os.environ.get("WANDB_PROJECT") or PROJECT
    require(entity != "" or options.dry_run, "entity is missing: pass --entity USER_OR_TEAM, or set WANDB_ENTITY.")
    for name, value in (("entity", entity), ("project", project)):
        require("/" not in value, f"{name}={value} has a slash: pass --entity and --project as two names.")
    return View(entity, project)


def read_url(url: str) -> View:
    """From the address in a browser; some servers put a path before the entity, or the tab's name after the project."""
    parts = urlsplit(url)
    names = [unquote(name) for name in parts.path.split("/") if name]
    if len(names) > 2 and names[-1] in ("workspace", "table"):
        names.pop()
    ids = parse_qs(parts.query).get("nw", [""])
    require(
        parts.scheme in ("http", "https") and len(names) >= 2 and ids[0] != "",
        f"url={url} is no saved view: pass an address like https://HOST/ENTITY/PROJECT?nw=a0b1c2d3.",
    )
    require(
        not ids[0].startswith("nwuser"),
        f"url={url} is a personal view, which cannot be written: save it as a new view and pass that one's address.",
    )
    return View(names[-2], names[-1], ids[0])


def check_library() -> None:
    require(
        importlib.util.find_spec("wandb_workspaces") is not None,
        'dashboard needs wandb-workspaces, which is not installed: pip install "gradiend_dist[dashboard]".',
    )


def check_name(name: str | None) -> None:
    import wandb_workspaces.workspaces as ws
    from pydantic import ValidationError

    try:
        ws.Workspace(entity="", project="", name=name or NAME)
    except ValidationError as error:
        raise UserError(f"name={name} has a symbol that W&B does not take: pass letters, digits and spaces.") from error


# --- what it shows


def new_workspace(view: View, options: DashboardOptions) -> Workspace:
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=view.entity,
        project=view.project,
        name=options.name or NAME,
        sections=sections(options.class_names or ()),
        settings=ws.WorkspaceSettings(x_axis=X_AXIS),
        runset_settings=ws.RunsetSettings(
            pinned_columns=[f"summary:{name}" for name in ("converged", "best_seed", "selection_score", "best_step")]
        ),
    )


def sections(class_names: Sequence[str] = ()) -> list[Section]:
    """In the order of the page."""
    return [
        section("Convergence", convergence()),
        section("Seeds", seeds()),
        section("Class encodings", class_encodings(class_names)),
        section("Speed and memory", speed_and_memory()),
        section("Health", health()),
    ]


def section(name: str, panels: list[PanelTypes]) -> Section:
    import wandb_workspaces.workspaces as ws

    return ws.Section(
        name=name,
        panels=panels,
        is_open=True,
        layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=math.ceil(len(panels) / COLUMNS)),
        panel_settings=ws.SectionPanelSettings(x_axis=X_AXIS),
    )


def convergence() -> list[PanelTypes]:
    return [
        lines("Loss", "loss"),
        lines("Correlation", "correlation", range_y=(-1.0, 1.0)),
        # From -1: what an untrained decoder is wrong by would hide the rest.
        lines("Target explained, and its limit", "explained", pattern="(_limit)?", range_y=(-1.0, 1.0)),
        lines("Target explained, its mean taken out", "explained_centred", range_y=(-1.0, 1.0)),
        lines("Held-out loss", "held_out_loss"),
        lines("Gradient norm", "grad_norm"),
        lines("Learning rate", "learning_rate"),
        lines("Encoder norm", "encoder_norm"),
        lines("Decoder norm", "decoder_norm"),
    ]


def seeds() -> list[PanelTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    return [
        wr.ScalarChart(title="Best seed", metric="best_seed"),
        wr.ScalarChart(title="Selection score", metric="selection_score"),
        wr.ScalarChart(title="Best step", metric="best_step"),
        wr.ScalarChart(title="Converged", metric="converged"),
        wr.ScalarChart(title="Converged seeds", metric="convergent_count"),
        wr.BarPlot(title="Best correlation, with a run for each seed", metrics=["best_correlation"]),
        wr.BarPlot(title="Target explained, with a run for each seed", metrics=["explained"]),
        wr.WeavePanelSummaryTable(table_name="seeds"),
        wr.MediaBrowser(title="Training of the selected seed", media_keys=["plots/training_convergence"]),
        wr.RunComparer(),  # also seed_0/selection_score, ...: the other panels of summaries take no pattern
    ]


def class_encodings(class_names: Sequence[str]) -> list[PanelTypes]:
    """All classes in one panel, whatever their names are; those that are named also alone."""
    return [
        lines("Mean encoding", "mean_encoding/", pattern=".+", range_y=(-1.0, 1.0)),
        *(lines(f"Mean encoding of {name}", f"mean_encoding/{name}", range_y=(-1.0, 1.0)) for name in class_names),
    ]


def speed_and_memory() -> list[PanelTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    return [
        lines("Seconds per step", "step_seconds"),
        # One panel each: W&B draws ten lines of a panel, and a few seeds times these would be more.
        *(lines(f"Seconds per step: {part.replace('_', ' ')}", f"seconds/{part}") for part in SECTIONS),
        lines("Gradients per second", "gradients_per_second"),
        lines("Rows per second", "rows_per_second"),
        lines("Memory of the fullest rank, GiB", "memory_gib"),
        lines("GPU utilisation, %", "gpu_utilisation", range_y=(0.0, 100.0)),
        wr.ScalarChart(title="Weights that GRADIEND reads", metric="space_size"),
        wr.ScalarChart(title="Weights after pruning", metric="pruned_size"),
    ]


def health() -> list[PanelTypes]:
    import wandb_workspaces.reports.v2.interface as wr

    return [
        lines("Alerts", "alerts"),
        lines("Gradient norm, logarithmic", "grad_norm", log_y=True),
        wr.MarkdownPanel(markdown=alert_table()),
    ]


def lines(title: str, series: str, *, pattern: str = "", **how: Any) -> LinePlot:
    """A series of every seed over the steps; `pattern`, a regular expression, is how its name goes on."""
    import wandb_workspaces.reports.v2.interface as wr

    # Only what RE2, JavaScript and Python read alike: W&B has changed the dialect before.
    return wr.LinePlot(title=title, x=X_AXIS, metric_regex=f"{ANY_SEED}{re.escape(series)}{pattern}$", **how)


def as_json(workspace: Workspace) -> str:
    """What would be sent. The library has no public name for it."""
    text: str = workspace._model.model_dump_json(by_alias=True, exclude_none=True, indent=2)
    return text


# --- where it goes


def save(view: View, options: DashboardOptions) -> str:
    """Create the view or update it; its address."""
    import wandb
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError  # which has no public name

    settings = set_up_wandb()
    try:
        workspace = new_workspace(view, options) if view.id is None else loaded(view, options)
        workspace.save()
        # The library's own address lacks the path of a server that has one.
        return f"{settings.app_url.rstrip('/')}/{view.entity}/{view.project}?{urlsplit(workspace.url).query}"
    except (wandb.errors.Error, WandbApiFailedError) as error:
        raise ServerError(explanation(error, settings.base_url, view)) from error


def set_up_wandb() -> Any:
    """W&B's settings for one short command, which asks nothing.

    The client gives up a request after 19 s (WANDB_HTTP_TIMEOUT) and then does not say why; with one retry it says so.
    """
    import wandb
    from pydantic import ValidationError

    try:
        return wandb.setup(settings=wandb.Settings(x_graphql_retry_max=1, silent=True)).settings
    except ValidationError as error:
        names = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise UserError(f"W&B does not take its setting of {names}: check the WANDB_ variables.") from error


def loaded(view: View, options: DashboardOptions) -> Workspace:
    """The saved view with our sections anew and first; its filters, colours and other sections are its owner's."""
    import wandb_workspaces.workspaces as ws
    from pydantic import ValidationError
    from wandb_workspaces.workspaces.errors import SpecVersionError

    try:  # the host of the address is not read
        workspace: Workspace = ws.Workspace.from_url(f"https://host/{view.entity}/{view.project}?nw={view.id}")
    except (SpecVersionError, ValidationError) as error:
        raise ServerError(
            f"url={options.url} was saved in a form that this version of wandb-workspaces cannot read: pip install "
            "--upgrade wandb-workspaces, or leave out --url to create a new view."
        ) from error
    except ValueError as error:
        raise ServerError(f"url={options.url} cannot be loaded ({last_line(error)}): check the address.") from error
    ours = sections(options.class_names or ())
    names = {section.name for section in ours}
    workspace.sections = [*ours, *(section for section in workspace.sections if section.name not in names)]
    workspace.name = options.name or workspace.name
    return workspace


def explanation(error: Exception, server: str, view: View) -> str:
    """One sentence on what W&B's client has raised."""
    from wandb.errors import AuthenticationError, UsageError
    from wandb.sdk.lib.service.service_connection import WandbApiFailedError

    # The client checks the key first, and calls everything that goes wrong there a failed authentication.
    cause = error.__cause__ if isinstance(error.__cause__, WandbApiFailedError) else error
    why = last_line(cause)
    response = cause.response if isinstance(cause, WandbApiFailedError) else None
    if isinstance(error, UsageError):
        return "no key for W&B is known here: run `wandb login`, or set WANDB_API_KEY."
    if cause is error and isinstance(error, AuthenticationError) or response and response.http_status in (401, 403):
        return f"W&B at {server} does not take the key ({why}): run `wandb login --relogin`, or set WANDB_API_KEY."
    if isinstance(error, AuthenticationError):
        return f"W&B at {server} does not answer ({why}): check the network and WANDB_BASE_URL, and try again."
    return (
        f"W&B at {server} did not save the workspace in {view.entity}/{view.project} ({why}): check both names, and "
        "that your key may write there."
    )


def last_line(error: BaseException) -> str:
    """The client tells of each attempt on a line of its own."""
    told = str(error).strip().splitlines() or [type(error).__name__]
    return told[-1].removeprefix("while retrying: ").rstrip(".")
