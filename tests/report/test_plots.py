"""Figures: what is drawn is what the record says, files are written as asked, and pyplot stays out of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradiend_dist.errors import UserError
from gradiend_dist.report import plots

pytest.importorskip("matplotlib")

PNG, PDF, SVG = b"\x89PNG", b"%PDF", b"<?xml"
LOSS, SCORE, CLASS = 0, 1, 2


def record(num_steps: int = 23, best: int = 12, flip: bool = False) -> dict[str, Any]:
    """A run of awkward length, evaluated at step 1 and every 4 steps, as it stands in memory: keys are numbers."""
    sign = -1.0 if flip else 1.0
    steps = [1, *range(4, num_steps + 1, 4)]
    return {
        "training_stats": {
            "scores": {step: sign * step / num_steps for step in steps},
            "mean_by_class": {step: {1.0: 0.03 * step, 0.0: 0.01, -1.0: -0.02 * step} for step in steps},
            "label_value_to_class_name": {1.0: "masc", -1.0: "fem", 0.0: "neut"},
        },
        "losses": [1.0 + 1.0 / step for step in range(1, num_steps + 1)],
        "best_score_checkpoint": {"correlation": sign * best / num_steps, "global_step": best, "epoch": 0},
        "convergence_info": {
            "converged": True,
            "convergence_metric": "correlation",
            "threshold": 0.45,
            "convergent_mean_by_class_threshold": 0.35,
        },
    }


def measured(stats: dict[str, Any], first: float = -0.4, limit: float | None = 0.81) -> dict[str, Any]:
    """The same run, which has also measured what its decoder explains: `first` at step 1, then more and more."""
    shares = {step: first if step == 1 else 0.03 * step for step in stats["training_stats"]["scores"]}
    stats["training_stats"] |= {"explained": shares, "explained_limit": limit}
    return stats


def closed_form() -> dict[str, Any]:
    """A record of max_steps=0: solved for, evaluated at step 0, nothing trained."""
    stats = record() | {"losses": [], "best_score_checkpoint": {"correlation": 0.9, "global_step": 0, "epoch": 0}}
    means = {0: {1.0: 0.9, 0.0: 0.01, -1.0: -0.8}}
    stats["training_stats"] |= {"scores": {0: 0.9}, "mean_by_class": means, "spectral": {"items": 16}}
    stats["training_stats"] |= {"explained": {0: 0.79}, "explained_limit": 0.81}
    return stats


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures as they were when they went to the file."""
    figures: list[Any] = []
    write = plots.write_figure

    def keep(figure: Any, *args: Any) -> Path:
        figures.append(figure)
        return write(figure, *args)

    monkeypatch.setattr(plots, "write_figure", keep)
    return figures


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Points of every line of a panel that has a name in the legend."""
    handles, names = axes.get_legend_handles_labels()
    return {
        name: (list(map(float, line.get_xdata())), list(map(float, line.get_ydata())))
        for name, line in zip(names, handles, strict=True)
    }


def test_plot_training_convergence__json_record_draws_what_the_memory_record_draws(
    tmp_path: Path, drawn: list[Any]
) -> None:
    """Fails if string keys are sorted as strings ("12" before "4") or miss their class name."""
    stats = record()
    plots.plot_training_convergence(stats, tmp_path / "memory.png")
    plots.plot_training_convergence(json.loads(json.dumps(stats)), tmp_path / "json.png")
    memory, loaded = drawn
    for panel in (LOSS, SCORE, CLASS):
        assert lines(memory.axes[panel]) == lines(loaded.axes[panel])
    steps, scores = lines(loaded.axes[SCORE])["correlation"]
    assert steps == [1, 4, 8, 12, 16, 20]
    assert scores == [step / 23 for step in steps]


def test_plot_training_convergence__losses_start_at_step_one_and_null_is_a_gap(
    tmp_path: Path, drawn: list[Any]
) -> None:
    stats = record()
    stats["losses"][5] = None
    plots.plot_training_convergence(stats, tmp_path / "a.png")
    steps, losses = lines(drawn[0].axes[LOSS])["each step"]
    assert steps == list(range(1, 24))
    assert losses[0] == 2.0
    assert math.isnan(losses[5])
    assert not any(map(math.isnan, losses[:5] + losses[6:]))
    assert not any(map(math.isnan, lines(drawn[0].axes[LOSS])["smoothed"][1]))


def test_plot_training_convergence__smoothing_keeps_the_mean_of_a_flat_alternation(
    tmp_path: Path, drawn: list[Any]
) -> None:
    """Classes alternate, so a smoothed line that still swings between them says nothing."""
    stats = record(num_steps=400, best=12)
    stats["losses"] = [1.0, 3.0] * 200
    plots.plot_training_convergence(stats, tmp_path / "a.png")
    inner = lines(drawn[0].axes[LOSS])["smoothed"][1][10:-10]
    assert inner == pytest.approx([2.0] * len(inner), abs=0.2)


@pytest.mark.parametrize(("metric", "panel", "other"), [("correlation", SCORE, LOSS), ("loss", LOSS, SCORE)])
def test_plot_training_convergence__threshold_stands_in_the_panel_of_its_metric(
    tmp_path: Path, drawn: list[Any], metric: str, panel: int, other: int
) -> None:
    stats = record()
    stats["convergence_info"]["convergence_metric"] = metric
    plots.plot_training_convergence(stats, tmp_path / "a.png")
    assert lines(drawn[0].axes[panel])["threshold 0.45"][1] == [0.45, 0.45]
    assert not [name for name in lines(drawn[0].axes[other]) if name.startswith("threshold")]
    assert lines(drawn[0].axes[CLASS])["threshold ±0.35"][1] == [0.35, 0.35]


def test_plot_training_convergence__best_step_is_marked_with_its_score(tmp_path: Path, drawn: list[Any]) -> None:
    """Fails if the last or the highest evaluation is marked instead of the recorded checkpoint."""
    plots.plot_training_convergence(record(best=12), tmp_path / "a.png")
    assert lines(drawn[0].axes[SCORE])["best: 0.522"] == ([12.0], [12 / 23])
    assert lines(drawn[0].axes[LOSS])["best step (12)"][0] == [12.0, 12.0]


def test_plot_training_convergence__classes_carry_their_names_and_the_mapped_ones(
    tmp_path: Path, drawn: list[Any]
) -> None:
    plots.plot_training_convergence(record(), tmp_path / "a.png", label_name_mapping={"masc": "Masc. Nom."})
    drawn_classes = lines(drawn[0].axes[CLASS])
    assert list(drawn_classes)[:3] == ["Masc. Nom.", "neut", "fem"]
    assert drawn_classes["Masc. Nom."][1] == [0.03 * step for step in (1, 4, 8, 12, 16, 20)]
    assert drawn_classes["fem"][1] == [-0.02 * step for step in (1, 4, 8, 12, 16, 20)]
    assert len({line.get_color() for line in drawn[0].axes[CLASS].get_legend_handles_labels()[0][:3]}) == 3


def test_plot_training_convergence__run_without_evaluation_says_so(tmp_path: Path, drawn: list[Any]) -> None:
    path = plots.plot_training_convergence({"training_stats": {}, "losses": [2.0]}, tmp_path / "a.png")
    assert path.read_bytes().startswith(PNG)
    assert [axes.texts[0].get_text() for axes in drawn[0].axes[1:]] == ["no evaluation recorded"] * 2


def test_plot_training_convergence__encodings_beyond_one_stay_in_view(tmp_path: Path, drawn: list[Any]) -> None:
    """An encoder without tanh is not bounded by 1; a fixed axis would cut its lines off."""
    stats = record()
    stats["training_stats"]["mean_by_class"][20][1.0] = 7.5
    plots.plot_training_convergence(stats, tmp_path / "a.png")
    assert drawn[0].axes[CLASS].get_ylim()[1] > 7.5
    assert drawn[0].axes[SCORE].get_ylim() == (-1.1, 1.1)


def panel_names(figure: Any) -> list[str]:
    return [axes.get_ylabel() for axes in figure.axes]


def test_plot_training_convergence__explained_share_has_a_panel_under_the_correlation(
    tmp_path: Path, drawn: list[Any]
) -> None:
    stats = measured(record())
    plots.plot_training_convergence(stats, tmp_path / "memory.png")
    plots.plot_training_convergence(json.loads(json.dumps(stats)), tmp_path / "json.png")
    plots.plot_training_convergence(record(), tmp_path / "old.png")
    memory, loaded, old = drawn
    assert panel_names(old) == ["loss", "correlation", "mean encoding"]
    assert panel_names(memory) == ["loss", "correlation", "target explained", "mean encoding"]
    found = lines(memory.axes[2])
    assert found == lines(loaded.axes[2])
    assert found["decoder"] == ([1, 4, 8, 12, 16, 20], [-0.4, 0.12, 0.24, 0.36, 0.48, 0.6])
    assert found["class means: 81 %"][1] == [0.81, 0.81]
    assert found["at the best step: 36 %"] == ([12.0], [0.36])
    limit = next(line for line in memory.axes[2].lines if line.get_label() == "class means: 81 %")
    assert limit.get_linestyle() == "--"


def test_plot_training_convergence__share_far_below_zero_is_an_arrow_and_hides_nothing(
    tmp_path: Path, drawn: list[Any]
) -> None:
    """An untrained decoder may be wrong by any factor: to scale, the rest would be one flat line."""
    stats = measured(record(), first=-4000.0, limit=None)
    stats["training_stats"]["explained"][20] = None
    plots.plot_training_convergence(stats, tmp_path / "a.png")
    found, (low, high) = lines(drawn[0].axes[2]), drawn[0].axes[2].get_ylim()
    assert found["below −100 %"] == ([1.0], [-1.0])
    assert math.isnan(found["decoder"][1][0]) and found["decoder"][1][1:5] == [0.12, 0.24, 0.36, 0.48]
    assert -1.5 < low < -1.0 and high == 1.05
    assert not [name for name in found if name.startswith("class means")]


@pytest.mark.filterwarnings("error")
def test_plots__closed_form_alone_is_drawn_by_markers(tmp_path: Path, drawn: list[Any]) -> None:
    plots.plot_training_convergence(closed_form(), tmp_path / "one.png")
    plots.plot_seed_convergence([(0, closed_form()), (1, closed_form())], 1, tmp_path / "seeds.png")
    one, seeds = drawn
    assert panel_names(one) == ["correlation", "target explained", "mean encoding"]
    assert panel_names(seeds) == ["correlation", "target explained"]
    assert one.axes[0].get_title(loc="left") == "Closed form: no step was trained"
    for axes in (*one.axes, *seeds.axes):
        assert list(axes.get_xticks()) == [0.0]
        dots = [line for line in axes.lines if list(line.get_xdata()) == [0]]
        assert dots and all(line.get_marker() not in ("None", "") and line.get_markersize() >= 5.0 for line in dots)
    assert lines(one.axes[1])["at the best step: 79 %"] == ([0.0], [0.79])


@pytest.mark.parametrize(
    ("output", "img_format", "written", "magic"),
    [
        ("a.png", None, "a.png", PNG),
        ("a", None, "a.png", PNG),
        ("a.pdf", None, "a.pdf", PDF),
        ("a.PDF", None, "a.PDF", PDF),
        ("a.png", "pdf", "a.pdf", PDF),
        ("run.v1", None, "run.v1.png", PNG),
        ("run.v1", "svg", "run.v1.svg", SVG),
        ("new/folder/a", "png", "new/folder/a.png", PNG),
    ],
)
def test_plot_training_convergence__file_has_the_format_asked_for(
    tmp_path: Path, output: str, img_format: str | None, written: str, magic: bytes
) -> None:
    path = plots.plot_training_convergence(record(), tmp_path / output, img_format=img_format)
    assert path == tmp_path / written
    assert path.read_bytes().startswith(magic)
    assert [file.name for file in path.parent.iterdir()] == [path.name], "a temporary file was left behind"


def test_plot_training_convergence__dpi_sets_the_size_in_pixels(tmp_path: Path) -> None:
    path = plots.plot_training_convergence(record(), str(tmp_path / "a.png"), img_dpi=50)
    width, height = (int.from_bytes(path.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (450, 420)


def test_plot_training_convergence__wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="img_format='bmpx'.*png"):
        plots.plot_training_convergence(record(), tmp_path / "a", img_format="bmpx")
    with pytest.raises(UserError, match="'training_stats'.*training.json"):
        plots.plot_training_convergence({"training_args": {}}, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_plot_seed_convergence__selected_seed_stands_out_and_every_seed_is_named(
    tmp_path: Path, drawn: list[Any]
) -> None:
    runs = [(seed, record(num_steps=20 + seed, flip=seed == 1)) for seed in range(9)]
    path = plots.plot_seed_convergence(runs, 7, tmp_path / "seeds.png")
    assert path.read_bytes().startswith(PNG)
    scores, losses = drawn[0].axes
    handles, names = scores.get_legend_handles_labels()
    assert [name for name in names if name.startswith("seed")] == [
        f"seed {seed}, selected" if seed == 7 else f"seed {seed}" for seed in range(9)
    ]
    selected, others = handles[7], handles[:7] + handles[8:9]
    assert all(selected.get_linewidth() > line.get_linewidth() for line in others)
    assert all(selected.get_zorder() > line.get_zorder() for line in others)
    looks = {(line.get_color(), line.get_linestyle()) for line in handles[:9]}
    assert len(looks) == 9, "two seeds look the same"
    assert [len(line.get_xdata()) for line in losses.lines[:9]] == [20 + seed for seed in range(9)]


def test_plot_seed_convergence__explained_shares_of_all_seeds_under_one_limit(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [(0, measured(record(), first=-7.0)), (1, record()), (2, measured(record(), first=-9.0))]
    plots.plot_seed_convergence(runs, 2, tmp_path / "seeds.png")
    assert panel_names(drawn[0]) == ["correlation", "target explained", "loss (smoothed)"]
    scores, shares, _ = drawn[0].axes
    assert list(lines(shares)) == ["below −100 %", "class means: 81 %"], "seeds are named once, above"
    of_seeds = [line for line in shares.lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in of_seeds] == [6, 0, 6]
    assert [line.get_color() for line in of_seeds] == [line.get_color() for line in scores.lines[:3]]


def test_plot_seed_convergence__wrong_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"selected_seed=3 .*\[0, 1\]"):
        plots.plot_seed_convergence([(0, record()), (1, record())], 3, tmp_path / "a")
    with pytest.raises(UserError, match="seed 1 has no key 'training_stats'"):
        plots.plot_seed_convergence([(0, record()), (1, {})], 0, tmp_path / "a")


def run_without_display(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that has `stats`, `plots` and `sys`, and no screen to draw on."""
    (tmp_path / "training.json").write_text(json.dumps(record()))
    head = (
        "import json, logging, sys\nfrom gradiend_dist.report import plots\nstats = json.load(open('training.json'))\n"
    )
    # The package need not be installed: the child finds it where this process did.
    package_root = str(Path(plots.__file__).resolve().parents[1])
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def test_plot_training_convergence__file_only_leaves_pyplot_alone(tmp_path: Path) -> None:
    """Importing pyplot picks a backend for the whole process, which is the user's to choose."""
    code = "plots.plot_training_convergence(stats, 'a.png')\nprint('matplotlib.pyplot' in sys.modules)"
    result = run_without_display(code, tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("False", "")


def test_plot_training_convergence__show_without_display_writes_the_file_and_warns_once(tmp_path: Path) -> None:
    """Fails if it waits for a window (timeout), raises, or says it in more than one line."""
    result = run_without_display("plots.plot_training_convergence(stats, 'a.png', show=True)", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "show=True" in result.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_plot_training_convergence__missing_matplotlib_names_the_extra(tmp_path: Path) -> None:
    code = "sys.modules['matplotlib'] = None\nplots.plot_training_convergence(stats, 'a.png')"
    result = run_without_display(code, tmp_path)
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("gradiend_dist.errors.UserError")
    assert 'pip install "gradiend_dist[plot]"' in last_line
