"""Policies that try to look better than they are: each trick is refused, or marks the row.

Where a trick is tried in vain, the policy falls back on the first expert, so that its rows equal
those of a policy that always takes the first expert.
"""

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from servegym.baselines.llm_routing.heuristics import RoundRobin
from servegym.baselines.policy_file import PolicyError, policy_from_file
from servegym.baselines.protocol import BasePolicy
from servegym.baselines.registry import describe_system, from_callable, list_policies
from servegym.envs.expert_placement import parallel_env as placement_agents
from servegym.envs.families import family_named, family_of
from servegym.envs.llm_routing import parallel_env as routing_agents
from servegym.experiments.evaluation import leaderboard
from servegym.experiments.evaluation.evaluate import DEFAULT_SEED, evaluate
from servegym.experiments.evaluation.guest import GuestPolicy
from servegym.experiments.evaluation.leaderboard import Point
from servegym.experiments.evaluation.play import problem_of
from servegym.experiments.evaluation.reporting import expert_names, report_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.render import render_episode

ENV_ID = "servegym/LLMRouting-v1"
SMALL = {"rate": 8.0, "episode_requests": 30}
WORLD = {
    "routing": {"rate": 1.0},
    "serverless": {"deployment": "gpu"},
    "placement": {"serving": "offload"},
}
HEAD = """
import numpy as np
from servegym.baselines.protocol import BasePolicy

class First(BasePolicy):
    def act(self, observation, action_mask):
        return np.ones(len(action_mask), int)
"""

# Looks for the world wherever a process might have it, and damages what it can reach. A trick that
# works makes it take expert 2, so that its rows differ from those of the honest policy.
CHEAT = (
    HEAD
    + """
import gc, sys, time
import gymnasium, servegym
from servegym.envs.llm_routing import core, kernel
from servegym.envs.workloads import catalog

class Policy(First):
    name = "cheat"
    clairvoyant = False

    def reset(self, num_envs, seed=None):
        super().reset(num_envs, seed)
        self.seed, self.steps = seed, 0
        self.known, self.copies = self.found(), self.rebuilt()  # before time is taken
        self.damage()

    def act(self, observation, action_mask):
        self.steps += 1
        if self.steps <= 3:  # other episodes may begin with the same prompt
            self.copies = [
                (env, env.step(1)[0]) for env, again in self.copies
                if all(np.array_equal(again[k], observation[k][0]) for k in again)
            ]
        self.known = self.known or (self.steps == 3 and len(self.copies) > 0)
        for part in (*observation.values(), action_mask):  # engine memory, if it were
            part[...] = 0
        action_mask[:, 2] = 1
        return np.full(len(action_mask), 2 if self.known else 1)

    def found(self):
        worlds = gymnasium.Env, gymnasium.vector.VectorEnv, core.RoutingBatch
        held = [o for o in gc.get_objects() if isinstance(o, worlds)]
        frame = sys._getframe()
        while frame:
            held += [v for v in frame.f_locals.values() if isinstance(v, worlds)]
            frame = frame.f_back
        return bool(held)

    def rebuilt(self):
        world = {"split": "eval", "rate": 8.0, "episode_requests": 30}
        seeds = (self.seed, self.seed + 1, 100_000)
        copies = [(gymnasium.make("servegym/LLMRouting-v1", **world), seed) for seed in seeds]
        for env, seed in copies:  # the engine is loaded with the first step
            env.reset(seed=seed)
            env.step(1)
        return [(env, env.reset(seed=seed)[0]) for env, seed in copies]

    def damage(self):
        catalog.load_catalog = kernel.step = core.RoutingBatch.kpis = None
        np.random.seed(0)
        np.random.default_rng = lambda *_: None
        time.monotonic = time.time = lambda: 0.0
        gymnasium.make_vec = gymnasium.make = None

    def feedback(self, reward):
        reward += 1e6
"""
)


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def kpis(rows: list[dict[str, Any]]) -> list[float]:
    return [row[key] for row in rows for key in ("avg_qos", "mean_e2e_s", "return", "memory_use")]


class Same(BasePolicy):
    """Always the first expert."""

    name = "same"

    def act(self, observation: Any, action_mask: Any) -> np.ndarray:
        return np.ones(len(action_mask), dtype=np.int64)


class Grabbing(Same):
    """Takes the environment and says that it is no clairvoyant."""

    name = "grabbing"
    needs_env = True
    clairvoyant = False

    def bind(self, env: Any) -> None:
        self.env = env


class Changing(Same):
    """Asks for another world once it has been looked at."""

    name = "changing"

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, Any] = {"reward": "completed_qos"}
        self.env_kwargs = self.asked

    def reset(self, num_envs: int, seed: int | None = None) -> None:
        super().reset(num_envs, seed)
        self.asked.update(rate=0.1, split="train")
        self.clairvoyant, self.env_view = False, "flat"


def test_a_cheat_in_a_process_of_its_own_plays_as_without_its_tricks(tmp_path: Path) -> None:
    file = write(tmp_path, CHEAT)
    rows = evaluate(ENV_ID, [file, Same(), "greedy_qos"], 2, None, SMALL)
    assert rows[0]["seed"] not in range(1_000_000), "nobody knew it"
    assert [row["source"] for row in rows[::2]] == ["guest", "guest", "servegym"]
    for name in ("arrival_s", "expert", "catalog_row"):
        for mine, honest in zip(rows.logs["cheat"], rows.logs["same"], strict=True):
            assert np.array_equal(mine[name], honest[name])
    again = evaluate(ENV_ID, ["greedy_qos"], 2, rows[0]["seed"], SMALL)
    assert kpis(again) == kpis(rows[4:]), "nothing is left in this process"
    # With the seed that everyone knows the same file rebuilds the episode: hence the other one.
    known = evaluate(ENV_ID, [file, "greedy_qos"], 1, DEFAULT_SEED, SMALL)
    assert known[0]["share_" + _expert(1)] > 0.9 and rows[0]["share_" + _expert(0)] == 1.0


def _expert(number: int) -> str:
    return expert_names(problem_of(ENV_ID, SMALL).models)[number]


@pytest.mark.parametrize("family", ["routing", "serverless", "placement"])
def test_the_world_is_not_the_policys_to_choose(family: str) -> None:
    record = family_named(family)
    world = {"model": "toy"} if family != "routing" else {}
    known = set(problem_of(record.env_id, world).arguments)
    report = report_of(record)
    assert set(report.interface) <= known
    for key, value in WORLD[family].items():
        guest = from_callable(lambda o, m: 1, "mine", env_kwargs={key: value})
        with pytest.raises(ValueError, match=rf"'mine' asks for {key}=.*allowed are"):
            resolve(guest, None, record, in_process=True)
    for argument in known - set(report.interface):
        guest = from_callable(lambda o, m: 1, "mine", env_kwargs={argument: None})
        with pytest.raises(ValueError, match=f"asks for {argument}="):
            resolve(guest, None, record, in_process=True)


def test_no_other_way_takes_the_world_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, HEAD + "\nclass Policy(First):\n    env_kwargs = {'rate': 1.0}\n")
    with pytest.raises(ValueError, match="asks for rate=1.0"):
        render_episode(ENV_ID, str(file), 1, SMALL)
    monkeypatch.setattr(leaderboard, "policies_for", lambda *_: ["random"])
    words = ["--quick", "--in-process", "--policy", str(file), "--point", "routing-8"]
    with pytest.raises(ValueError, match="asks for rate=1.0"):
        leaderboard.main(words)


def test_what_is_said_after_the_check_does_not_count() -> None:
    rows = evaluate(ENV_ID, [Changing(), Same()], 2, 7, SMALL, num_envs=1, in_process=True)
    assert [row["source"] for row in rows] == ["guest in process"] * 4
    assert [row["avg_qos"] for row in rows[:2]] == [row["avg_qos"] for row in rows[2:]]


def test_whoever_takes_the_environment_is_clairvoyant() -> None:
    (row,) = evaluate(ENV_ID, [Grabbing()], 1, 7, SMALL, in_process=True)
    assert row["clairvoyant"] and row["source"] == "guest in process"
    early = from_callable(lambda o, m: 1, "early", env_kwargs={"reward": "paid_forward"})
    assert resolve(early, None, family_of(ENV_ID), in_process=True).clairvoyant
    with pytest.raises(ValueError, match="'grabbing' has needs_env.*--in-process"):
        evaluate(ENV_ID, [Grabbing()], 1, 7, SMALL)


def test_feedback_is_a_copy_and_tells_of_nothing_that_has_not_ended() -> None:
    told: list[np.ndarray] = []

    class InTurn(Same):
        def act(self, observation: Any, action_mask: Any) -> np.ndarray:
            self.turn = getattr(self, "turn", -1) + 1
            return np.full(len(action_mask), 1 + self.turn % 6)

    class Learner(InTurn):
        name = "learner"

        def feedback(self, reward: np.ndarray) -> None:
            told.append(reward.copy())
            reward += 1e6

    world = {"rate": 8.0, "episode_requests": 60, "reward": "qos_aware", "penalty": "literal"}
    (row,) = evaluate(ENV_ID, [Learner()], 1, 7, world, in_process=True)
    (same,) = evaluate(ENV_ID, [InTurn()], 1, 7, world, in_process=True)
    assert row["return"] == same["return"]
    # What ended on time, without the penalty that depends on the true length of the request.
    assert min(map(np.min, told)) >= 0.0
    assert float(np.sum(told)) == pytest.approx(60 * row["avg_qos"])
    assert row["return"] < 60 * row["avg_qos"] - 1.0


def test_a_guest_is_told_what_has_ended_if_it_asks(tmp_path: Path) -> None:
    told = """
class Policy(First):
    name = "told"
    needs_outcomes = ASKED

    def reset(self, num_envs, seed=None):
        super().reset(num_envs, seed)
        self.rows = np.ones(num_envs, int)

    def outcomes(self, ended):
        assert (ended["outcome"] > 0).all()
        self.rows[ended["row"]] = 2

    def act(self, observation, action_mask):
        return self.rows
"""
    sent = {}
    for asked in ("True", "False"):
        file = tmp_path / f"{asked}.py"
        file.write_text(HEAD + told.replace("ASKED", asked))
        sent[asked] = evaluate(ENV_ID, [file], 2, 7, SMALL).logs["told"]
    for log in sent["True"]:
        first = np.flatnonzero(log["expert"] == 1)[0]
        assert (log["expert"][:first] == 0).all() and (log["expert"][first:] == 1).all()
        # An answer, or a refusal at arrival, had come by that decision and not before.
        ended = np.where(log["outcome"] == 1, log["finish_s"], log["arrival_s"])[:first].min()
        assert log["arrival_s"][first - 1] <= ended <= log["arrival_s"][first]
    assert all((log["expert"] == 0).all() for log in sent["False"])
    file = tmp_path / "True.py"
    with pytest.raises(ValueError, match="needs_outcomes"):
        evaluate(family_named("serverless").env_id, [file], 1, 7, {"model": "toy"})


@pytest.mark.parametrize("name", ["greedy_qos", "sac_han", "a\nb", "x" * 61, "best (clairvoyant)"])
def test_a_guest_does_not_take_another_policys_name(name: str) -> None:
    with pytest.raises(ValueError, match="policy's name is"):
        evaluate(ENV_ID, [from_callable(lambda o, m: 1, name)], 1, 7, SMALL, in_process=True)


@pytest.mark.parametrize(
    ("trick", "said"),
    [
        ("time.sleep(60)", "'mine' took more than time_limit_s=0.5 s"),
        ("os._exit(3)", "'mine' has ended its process .exit status 3"),
        ("[object()]", "policy 'mine' .*integers"),
        ("{'plan': [object()]}", "'mine' failed: TypeError: Object of type object is not JSON"),
        ("1 / 0", "'mine' failed at .*mine.py:3: ZeroDivisionError"),
    ],
)
def test_a_guest_that_does_not_answer_is_an_error_that_names_it(
    tmp_path: Path, trick: str, said: str
) -> None:
    text = f"import os, time\ndef act(observation, action_mask):\n    return {trick}\n"
    guest: Any = resolve(write(tmp_path, text), None, family_of(ENV_ID))
    guest.time_limit_s = 0.5 if "sleep" in trick else 60.0
    process = guest._process
    with pytest.raises(PolicyError, match=said):
        evaluate(ENV_ID, [guest], 1, 7, SMALL)
    assert process.returncode is not None


def test_a_guests_processes_end_with_it(tmp_path: Path) -> None:
    trace = tmp_path / "helper"
    text = (
        "import subprocess\n"
        f"open({str(trace)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "def act(observation, action_mask):\n    return 1\n"
    )
    evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, SMALL)
    state = Path("/proc") / trace.read_text() / "stat"
    for _ in range(500):  # an orphan is waited for by another, in its own time
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    else:
        pytest.fail("a process of the guest lives on")
    guest: Any = GuestPolicy(Same(), None)
    guest._pipe.close()  # as when the evaluator's process is gone
    assert guest._process.wait(10) == 0


def test_slow_decisions_count_against_the_latency_of_their_requests(tmp_path: Path) -> None:
    text = (
        "import time\nnumber = 0\ndef act(observation, action_mask):\n    global number\n"
        "    number += 1\n    time.sleep(0.5 * (number % 100 == 0))\n    return 1 + number % 6\n"
    )
    world = SMALL | {"episode_requests": 200}
    rows = evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, world)
    (row,), (log,) = rows, rows.logs["mine"]
    assert row["slowest_decision_s"] >= 0.5 and row["decision_s"] >= 2 * 0.5 / 200
    assert row["mean_routing_s"] >= 0.005 + 2 * 0.5 / 200
    waited = log["available_s"] - log["arrival_s"] - 8e-6 * 4 * log["prompt_tokens"]
    assert (waited[[99, 199]] >= 0.5).all()
    # On a busy machine a few others may be slow.
    assert np.isclose(np.nanmedian(np.delete(waited, [99, 199])), 0.005, atol=1e-3)


def test_the_rows_of_a_block_wait_for_the_whole_of_a_decision(tmp_path: Path) -> None:
    text = "import time\ndef act(observation, action_mask):\n    time.sleep(0.05)\n    return 1\n"
    world = SMALL | {"episode_requests": 4}
    rows = evaluate(ENV_ID, [write(tmp_path, text)], 2, 7, world, num_envs=2)
    assert all(row["decision_s"] >= 0.1 and row["mean_routing_s"] >= 0.105 for row in rows)


def test_what_a_guest_prints_is_no_part_of_the_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "def act(observation, action_mask):\n    print('x' * 100_000)\n    return 1\n"
    (row,) = evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, SMALL)
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("x") >= 30 * 100_000
    assert row["share_" + _expert(0)] == 1.0


@pytest.mark.parametrize("wrong", [lambda a: a[:, None], lambda a: a + 99, lambda a: a * 0.5])
def test_a_wrong_action_is_an_error_that_names_the_policy(wrong: Any) -> None:
    class Wrong(Same):
        def act(self, observation: Any, action_mask: Any) -> Any:
            return wrong(super().act(observation, action_mask))

    with pytest.raises(PolicyError, match="'same' acted wrongly"):
        evaluate(ENV_ID, [Wrong()], 1, 7, SMALL, in_process=True)


def test_a_guest_remembers_no_other_episode(tmp_path: Path) -> None:
    text = (
        "resets = 0\n\nclass Policy(First):\n    def reset(self, num_envs, seed=None):\n"
        "        global resets\n        resets += 1\n        assert (num_envs, resets) == (1, 1)\n"
    )
    guest = resolve(write(tmp_path, HEAD + text), None, family_of(ENV_ID))
    point = Point("small", family_named("routing"), SMALL, 2, {})
    assert leaderboard.measure(point, guest, seed=7)["episodes"] == 2


def test_a_running_episode_hides_how_its_requests_will_end() -> None:
    for make in (gymnasium.make, lambda _, **kwargs: routing_agents(**kwargs)):
        env: Any = make(ENV_ID, rate=8.0, episode_requests=60)
        _, info = env.reset(seed=3)
        for k in range(40):
            _step(env, 1 + k % 6)
        log = env.unwrapped.request_log()
        pending = log["outcome"] == 0
        assert 0 < pending.sum() < len(log) == 40
        hidden = log[pending]
        assert np.isnan(hidden["score"]).all() and np.isnan(hidden["best_score"]).all()
        assert (hidden["output_tokens"] == 0).all() and (hidden["catalog_row"] == -1).all()
        assert (log[~pending]["catalog_row"] >= 0).all() and (hidden["prompt_tokens"] > 0).all()
        while not _step(env, 0):
            pass
        final = env.unwrapped.request_log()
        assert (final["catalog_row"] >= 0).all() and np.isfinite(final["best_score"]).all()


def _step(env: Any, action: int) -> bool:
    """The same action for whoever acts; whether the episode has ended."""
    if not hasattr(env, "possible_agents"):
        return env.step(action)[2]
    env.step(dict.fromkeys(env.agents, action))
    return not env.agents


def test_the_other_families_hide_it_too() -> None:
    kwargs = {"model": "toy", "epochs": 3, "mean_interarrival_s": 0.3, "epoch_s": 20.0}
    single = gymnasium.make("servegym/ExpertPlacement-v0", **kwargs)
    env: Any
    for env in (single, placement_agents(**kwargs)):
        env.reset(seed=1)
        space = env.action_space("server_0") if hasattr(env, "agents") else env.action_space
        action = {"migrate": 0, "plan": np.zeros(space["plan"].shape, np.float32)}
        actions = dict.fromkeys(env.agents, action) if hasattr(env, "agents") else action
        env.step(actions)
        log = env.unwrapped.request_log()
        pending = np.isnan(log["finish_s"])
        assert 0 < pending.sum() < len(log)
        for name, value in (("prompt", -1), ("task", -1), ("output_tokens", 0)):
            assert (log[name][pending] == value).all() and (log[name][~pending] != value).all()
        assert not (log["first_token_s"] > 20.0).any()
        env.step(actions)
        env.step(actions)
        assert (env.unwrapped.request_log()["prompt"] >= 0).all()
    env = gymnasium.make("servegym/ServerlessMoE-v0", model="toy", episode_requests=5)
    env.reset(seed=1)
    for served in range(1, 4):  # a decision serves its request to the end
        env.step(np.zeros(5, dtype=np.int64))
        assert len(env.unwrapped.request_log()) == served


def test_a_policy_of_the_package_stays_in_process(tmp_path: Path) -> None:
    problem, family = problem_of(ENV_ID, SMALL), family_of(ENV_ID)
    system = describe_system(problem)
    for info in list_policies(family.name):
        assert resolve(info.name, problem, family).source == "servegym", info.name
    assert resolve(RoundRobin(system), problem, family).source == "servegym"
    file = write(tmp_path, "def act(observation, action_mask):\n    return 1\n")
    for guest in (from_callable(lambda o, m: 1, "mine"), file, policy_from_file(file, system)):
        policy = resolve(guest, problem, family, in_process=True)
        assert policy.source == "guest in process"
        assert resolve(policy, problem, family) is policy
