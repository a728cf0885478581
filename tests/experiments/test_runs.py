"""What is made of a run's folder: the picture of its curve, a moving picture of its policy."""

import json
import sys
from pathlib import Path

import pytest

from servegym.experiments.papers.plotting import pyplot
from servegym.experiments.runs import draw_runs

from ..runner import servegym

ROUTING, PLACEMENT = "servegym/LLMRouting-v1", "servegym/ExpertPlacement-v0"
image = pytest.importorskip("PIL.Image")


def make_run(folder, env_id, scores, rule=0.6, **env_kwargs):
    """A run with an evaluation at each step of ``scores`` and rows of losses between."""
    folder.mkdir(parents=True)
    content = {"agent": "ppo", "name": "ppo", "env_id": env_id, "env_kwargs": env_kwargs}
    (folder / "args.json").write_text(json.dumps({**content, "args": {"seed": 1}}))
    rows = [{"global_step": 1, "losses/value_loss": 0.5}]
    beside = {} if rule is None else {"eval/rule_score": rule}
    rows += [{"global_step": s, "eval/score": q, **beside} for s, q in scores.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + '{"global_step": 9')  # it still writes
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The axes of each picture that is saved."""
    drawn = []
    monkeypatch.setattr(
        "servegym.experiments.runs.as_png", lambda figure: drawn.append(figure.axes[0]) or b""
    )
    yield drawn
    pyplot().close("all")


def test_a_curve_goes_through_the_evaluations_beside_its_rule(tmp_path, figures):
    scores = {0: 0.0, 2_000: 0.3, 20_000: 0.5, 150_000: 0.625}
    draw_runs([make_run(tmp_path / "ppo_1", ROUTING, scores)])
    curve, rule = figures[0].lines
    assert dict(zip(*curve.get_data(), strict=True)) == scores
    assert set(rule.get_ydata()) == {0.6}
    assert [text.get_text() for text in figures[0].texts] == ["priced_greedy 0.6", "ppo_1 0.625"]
    assert "higher is better" in figures[0].get_ylabel()
    # From the first evaluation on it shows equal factors at equal distances.
    assert figures[0].get_xscale() == "symlog"


def test_an_environment_of_another_package_has_a_curve(tmp_path, figures):
    draw_runs([make_run(tmp_path / "x", "CartPole-v1", {0: 20, 100: 200}, rule=None)])
    assert len(figures[0].lines) == 1 and figures[0].get_ylabel() == "score"


def test_plot_writes_the_picture_into_the_first_run(tmp_path):
    runs = [make_run(tmp_path / name, ROUTING, {0: 0.1, 9: 0.2}) for name in ("one", "two")]
    result = servegym("plot", *runs)
    assert result.exit_code == 0 and str(runs[0] / "curve.png") in result.output, result.output
    with image.open(runs[0] / "curve.png") as picture:
        assert picture.format == "PNG"
    assert not (runs[1] / "curve.png").exists()
    assert servegym("plot", *runs, "--out", tmp_path / "x.png").exit_code == 0
    assert (tmp_path / "x.png").exists()


def test_what_cannot_be_drawn_is_refused_by_name(tmp_path):
    routing = make_run(tmp_path / "routing", ROUTING, {0: 0.1})
    placement = make_run(tmp_path / "placement", PLACEMENT, {0: 9.0})
    empty = make_run(tmp_path / "empty", ROUTING, {})
    for runs, named in (
        ([tmp_path / "nowhere"], ("nowhere is no run", "args.json")),
        ([empty], ("empty has no evaluation", "eval/score")),
        ([routing, placement], ("routing is of llm_routing", "placement is of expert_placement")),
        ([routing, "--out", tmp_path / "x.gif"], (".png",)),
    ):
        result = servegym("plot", *runs)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
        assert all(name in result.stderr for name in named), result.stderr
    assert not list(tmp_path.rglob("*.png"))


def test_render_finds_what_a_run_has_learned_to_do(tmp_path, monkeypatch):
    run = make_run(tmp_path / "ppo_1", ROUTING, {0: 0.1}, rate=8, episode_requests=30)
    asked = {}

    def render_episode(env_id, policy, steps, env_kwargs, *, out, **_):
        asked.update(env_id=env_id, policy=Path(policy), env_kwargs=env_kwargs, out=out)

    monkeypatch.setattr("servegym.experiments.render.render_episode", render_episode)
    assert servegym("render", "--policy", run, "--set", "rate=5").exit_code == 0
    assert asked["env_id"] == ROUTING and asked["policy"] == run
    assert asked["env_kwargs"] == {"rate": 5, "episode_requests": 30}
    assert asked["out"] == run / "ppo_1.gif"
    words = ("--policy", run, "--out", tmp_path / "x.mp4")
    assert servegym("render", PLACEMENT, *words).exit_code == 0
    assert asked["env_id"] == PLACEMENT and asked["env_kwargs"] == {}
    assert asked["out"] == tmp_path / "x.mp4"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--policy", "random"), "ENV_ID is missing"),
        (("--policy", "."), "args.json"),
        ((ROUTING, "--out", "x.mp4"), "pip install '.[video]'"),
    ],
)
def test_render_needs_an_id_and_a_library_for_videos(tmp_path, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "moviepy", None)
    monkeypatch.setattr("servegym.experiments.render.open_envs", lambda *_: pytest.fail("worked"))
    result = servegym("render", *words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert named in result.stderr


def test_a_video_has_even_sides(tmp_path):
    moviepy = pytest.importorskip("moviepy")
    out = tmp_path / "episode.mp4"
    words = ("--policy", "greedy_qos", "--steps", 4, "--set", "episode_requests=20")
    result = servegym("render", ROUTING, *words, "--out", out)
    assert result.exit_code == 0, result.output
    with moviepy.VideoFileClip(str(out)) as clip:
        assert clip.n_frames == 4 and all(side % 2 == 0 for side in clip.size)
