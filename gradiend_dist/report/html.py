"""The report command: a run on one page that opens from disk, for whoever has no W&B.

gradiend-dist report RUN_DIR [RUN_DIR ...]

It reads JSON, YAML and CSV files below RUN_DIR and no model, so it takes a second, also while the run goes on. The page
has no script and asks for nothing from elsewhere; its Content-Security-Policy forbids both.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gradiend_dist.report import sections
from gradiend_dist.report.effect import rewriting
from gradiend_dist.report.elements import duration, escape, exact, or_dash, percent, signed, tile, whole_percent
from gradiend_dist.report.records import Run, number
from gradiend_dist.report.speed import speed

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")

# At most this part of what it could explain: the decoder was hardly trained.
UNTRAINED = 0.5

HIGH_CORRELATION = 0.5


def page(run: Run, usual: Mapping[str, Any]) -> str:
    """`usual` are the defaults of the arguments: what differs from them is shown first."""
    parts = {
        "Convergence": sections.convergence(run),
        "Encodings": sections.encodings(run),
        "Seeds": sections.seed_table(run),
        "Rewriting": rewriting(run),
        "Pruning": sections.pruning(run),
        "Speed": speed(run),
        "Health": sections.health(run),
        "Configuration": sections.configuration(run, usual),
    }
    links = "".join(f'<a href="#{title.lower()}">{title}</a>' for title in parts)
    body = "".join(
        f'<section id="{title.lower()}"><h2>{title}</h2>{content}</section>' for title, content in parts.items()
    )
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{escape(run.name)} · GRADIEND</title><style>{STYLE}</style></head>'
        f"<body><main>{header(run)}<nav>{links}</nav>{body}"
        f"<footer>Written by gradiend-dist report. Trained with {escape(run.made_by) or 'an unknown version'}.</footer>"
        "</main></body></html>\n"
    )


def header(run: Run) -> str:
    look, verdict, sentence = verdict_of(run)
    tiles = "".join(tile(*fact) for fact in facts(run))
    return (
        f'<header><p class="over">GRADIEND · {escape(" / ".join(run.targets()) or "training")}</p>'
        f'<h1>{escape(run.name)} <span id="verdict" class="badge {look}">{verdict}</span></h1>'
        f'<p class="lead">{escape(sentence)}</p>{hint(run)}<div class="tiles">{tiles}</div></header>'
    )


def verdict_of(run: Run) -> tuple[str, str, str]:
    """A look, one or two words, and the sentence that explains them."""
    best = run.selected
    means = ", ".join(f"{name} {signed(mean)}" for name, mean in best.means_at_best().items())
    found = best.score_words() + ("" if best.best_step is None else f" at step {best.best_step}")
    if (share := best.explained_at_best()) is not None:
        limit = or_dash(best.explained_limit, whole_percent)
        found += f"; the decoder explains {whole_percent(share)} of the target (class means: {limit})"
    found += f"; mean encoding {means}" if means else ""
    if not run.finished:
        active = next((seed for seed in reversed(run.seeds) if not seed.record), run.seeds[-1])
        where = f"Seed {active.number} is at step {active.last_step}{_of_steps(run)}{_last_seen(run)}."
        return "busy", "not finished", f"{where} Best so far is seed {best.number}: {found}."
    alone = " was solved in closed form" if best.is_closed_form else " was trained"
    chosen = f"Seed {best.number}" + (f" of {len(run.seeds)} was selected" if len(run.seeds) > 1 else alone)
    if best.converged:
        return "good", "converged", f"{chosen}: {found}."
    return "bad", "not converged", f"{chosen}, but {best.reason or 'it did not converge'}: {found}."


def hint(run: Run) -> str:
    """The encoder may tell the classes apart long before the decoder is of use: its correlation does not show that."""
    seed = run.selected
    share, limit, correlation = seed.explained_at_best(), seed.explained_limit, seed.correlation
    if not run.finished or share is None or limit is None or correlation is None:
        return ""
    if abs(correlation) < HIGH_CORRELATION or limit <= 0.0 or share >= UNTRAINED * limit:
        return ""
    solved = "spectral" in seed.stats
    remedy = "Raise <code>spectral_items</code>" if solved else "Use <code>initialization=spectral</code>"
    return (
        f'<p class="hint">The decoder explains {whole_percent(max(share, 0.0))} of the target, class means would '
        f"explain {whole_percent(limit)}: the encoder tells the classes apart, but the decoder is hardly trained. "
        f"{remedy}, or <code>learning_rate=auto</code>.</p>"
    )


def _of_steps(run: Run) -> str:
    steps = number(run.config.get("max_steps"))
    return f" of {steps:.0f}" if steps is not None and steps > 0 else ""


def _last_seen(run: Run) -> str:
    last = next((seen for row in reversed(run.rows) if (seen := number(row.get("time"))) is not None), None)
    if last is None or not 0 < last < 1e11:
        return ""
    return f" (last row {datetime.fromtimestamp(last, timezone.utc):%d %B %Y, %H:%M} UTC)"


def facts(run: Run) -> list[tuple[str, str, str]]:
    best = run.selected
    judged = [seed for seed in run.seeds if seed.converged is not None]
    seconds = best.seconds().get("total")
    alerts = sum("alert" in row for row in run.rows)
    by_loss = best.correlation is None and best.loss is not None
    name, score = ("loss", best.loss) if by_loss else ("correlation", best.correlation)
    where = "" if best.best_step is None else f", step {best.best_step}"
    share = f"{percent(run.kept, run.size)} of {run.size:,}" if run.weights else "known at the end"
    health_words = "not recorded" if not run.rows else "see Health" if alerts else "all looks well"
    explained, limit = best.explained_at_best(), or_dash(best.explained_limit, whole_percent)
    return [
        (name, or_dash(score, exact), f"seed {best.number}{where}"),
        *([] if explained is None else [("target explained", whole_percent(explained), f"class means: {limit}")]),
        ("seeds converged", f"{sum(seed.converged is True for seed in judged)} of {len(judged)}", _required(run)),
        ("weights kept", f"{run.kept:,}" if run.weights else "–", share),
        ("time", or_dash(seconds, duration), f"of seed {best.number}"),
        ("alerts", str(alerts) if run.rows else "–", health_words),
    ]


def _required(run: Run) -> str:
    wanted, most = number(run.config.get("min_convergent_seeds")), number(run.config.get("max_seeds"))
    if most is None or most == 1:
        return ""
    return f"up to {most:.0f} tried" + (f", {wanted:.0f} wanted" if wanted is not None else "")
