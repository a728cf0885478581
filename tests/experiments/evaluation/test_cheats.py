"""Policies that try to look better than they are: each trick is refused, or marks the row."""

import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from servegym.baselines.llm_routing.heuristics import RoundRobin
from servegym.baselines.policy_file import PolicyError, policy_from_file
from servegym.baselines.protocol import BasePolicy
from servegym.baselines.registry import describe_system, from_callable, list_policies
from servegym.envs.expert_placement import parallel_env as placement_agents
from servegym.envs.families import family_named, family_of
from servegym.envs.llm_routing import parallel_env as routing_agents
from servegym.experiments.evaluation import guest as guests
from servegym.experiments.evaluation import leaderboard
from servegym.experiments.evaluation.evaluate import evaluate
from servegym.experiments.evaluation.guest import IN_PROCESS, GuestPolicy
from servegym.experiments.evaluation.play import DEFAULT_SEED, problem_of
from servegym.experiments.evaluation.reporting import report_of
from servegym.experiments.evaluation.resolve import resolve
from servegym.experiments.render import render_episode

ENV_ID = "servegym/LLMRouting-v1"
SMALL = {"rate": 8.0, "episode_requests": 30}
HEAD = """
import numpy as np
from servegym.baselines.protocol import BasePolicy

class First(BasePolicy):
    def act(self, observation, action_mask):
        return np.ones(len(action_mask), int)
"""

# Looks for the world in memory and by drawing it again. A trick that works makes it take expert 2,
# so that its rows differ from those of the honest policy.
CHEAT = (
    HEAD
    + """
import gc
import gymnasium, servegym
from servegym.envs.llm_routing import core

class Policy(First):
    name = "cheat"

    def reset(self, num_envs, seed=None):
        super().reset(num_envs, seed)
        worlds = gymnasium.Env, gymnasium.vector.VectorEnv, core.RoutingBatch
        self.knows, self.steps = any(isinstance(o, worlds) for o in gc.get_objects()), 0
        world = {"split": "eval", "rate": 8.0, "episode_requests": 30}
        copies = [gymnasium.make("servegym/LLMRouting-v1", **world) for _ in range(3)]
        seeds = (seed, seed + 1, 100_000)
        self.copies = [(env, env.reset(seed=at)[0]) for env, at in zip(copies, seeds)]

    def act(self, observation, action_mask):
        self.steps += 1
        if self.steps <= 3:  # other episodes may begin with the same prompt
            self.copies = [
                (env, env.step(1)[0]) for env, again in self.copies
                if all(np.array_equal(again[k], observation[k][0]) for k in again)
            ]
        self.knows = self.knows or (self.steps == 3 and len(self.copies) > 0)
        for part in (*observation.values(), action_mask):  # engine memory, if it were
            part[...] = 0
        np.random.seed(0)
        return np.full(len(action_mask), 2 if self.knows else 1)

    def feedback(self, reward):
        reward += 1e6
"""
)


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


class Same(BasePolicy):
    name = "same"

    def act(self, observation: Any, action_mask: Any) -> np.ndarray:
        return np.ones(len(action_mask), dtype=np.int64)


def test_a_cheat_in_a_process_of_its_own_plays_as_without_its_tricks(tmp_path: Path) -> None:
    file = write(tmp_path, CHEAT)
    rows = evaluate(ENV_ID, [file, "greedy_qos"], 1, None, SMALL)
    seed = rows[0]["seed"]
    assert seed not in range(1_000_000), "nobody knew it"
    assert [row["source"] for row in rows] == ["guest", "servegym"]
    honest = evaluate(ENV_ID, [Same()], 1, seed, SMALL, guests=IN_PROCESS)
    for name in ("arrival_s", "expert", "catalog_row"):
        assert np.array_equal(rows.logs["cheat"][0][name], honest.logs["same"][0][name])
    again = evaluate(ENV_ID, ["greedy_qos"], 1, seed, SMALL)
    assert repr(again) == repr(rows[1:]), "nothing is left in this process"
    # With the seed that everyone knows the same file rebuilds the episode: hence the other one.
    known = evaluate(ENV_ID, [file, "greedy_qos"], 1, DEFAULT_SEED, SMALL)
    first, second, *_ = (key for key in known[0] if key.startswith("share_"))
    assert known[0][second] > 0.9 and rows[0][first] == 1.0


@pytest.mark.parametrize("family", ["routing", "serverless", "placement", "prefix"])
def test_the_world_is_not_the_policys_to_choose(family: str) -> None:
    record = family_named(family)
    world = {"model": "toy"} if family in ("serverless", "placement") else {}
    arguments = set(dict(problem_of(record.env_id, world).arguments))
    interface = set(report_of(record).interface)
    assert interface < arguments
    for argument in arguments - interface:
        guest = from_callable(lambda o, m: 1, "mine", env_kwargs={argument: None})
        with pytest.raises(ValueError, match=f"'mine' asks for {argument}=.*allowed are"):
            resolve(guest, None, record, guests=IN_PROCESS)


def test_no_other_way_takes_the_world_either(tmp_path: Path) -> None:
    file = write(tmp_path, HEAD + "\nclass Policy(First):\n    env_kwargs = {'rate': 1.0}\n")
    words = f"--quick --in-process --policy {file} --point routing-8 --at-least random".split()
    for evaluated in (
        lambda: render_episode(ENV_ID, str(file), 1, SMALL),
        lambda: leaderboard.main(words),
    ):
        with pytest.raises(ValueError, match="asks for rate=1.0"):
            evaluated()


def test_whoever_takes_the_environment_is_clairvoyant() -> None:
    class Grabbing(Same):
        name = "grabbing"
        needs_env = True

        def bind(self, env: Any) -> None:
            self.env = env

    (row,) = evaluate(ENV_ID, [Grabbing()], 1, 7, SMALL, guests=IN_PROCESS)
    assert row["clairvoyant"] and row["source"] == "guest in process"
    early = from_callable(lambda o, m: 1, "early", env_kwargs={"reward": "paid_forward"})
    assert resolve(early, None, family_of(ENV_ID), guests=IN_PROCESS).clairvoyant
    with pytest.raises(ValueError, match="'grabbing' has needs_env.*--in-process"):
        evaluate(ENV_ID, [Grabbing()], 1, 7, SMALL)


def test_feedback_is_a_copy_and_tells_of_nothing_that_has_not_ended() -> None:
    told: list[np.ndarray] = []

    class Learner(RoundRobin):
        name = "learner"

        def feedback(self, reward: np.ndarray) -> None:
            told.append(reward.copy())
            reward += 1e6

    world = {"rate": 8.0, "episode_requests": 60, "reward": "qos_aware", "penalty": "literal"}
    system = describe_system(problem_of(ENV_ID, world))
    guests = [Learner(system), "round_robin"]
    row, same = evaluate(ENV_ID, guests, 1, 7, world, guests=IN_PROCESS)
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
    choice = 1

    def outcomes(self, ended):
        self.choice = 2 if (ended["outcome"] > 0).all() and len(ended) else self.choice

    def act(self, observation, action_mask):
        return np.full(len(action_mask), self.choice)
"""
    sent = {}
    for asked in ("True", "False"):
        file = write(tmp_path, HEAD + told.replace("ASKED", asked), f"{asked}.py")
        sent[asked] = evaluate(ENV_ID, [file], 1, 7, SMALL).logs["told"]
    for log in sent["True"]:
        first = np.flatnonzero(log["expert"] == 1)[0]
        assert (log["expert"][:first] == 0).all() and (log["expert"][first:] == 1).all()
        # An answer, or a refusal at arrival, had come by that decision and not before.
        ended = np.where(log["outcome"] == 1, log["finish_s"], log["arrival_s"])[:first].min()
        assert log["arrival_s"][first - 1] <= ended <= log["arrival_s"][first]
    assert all((log["expert"] == 0).all() for log in sent["False"])
    with pytest.raises(ValueError, match="needs_outcomes"):
        resolve(tmp_path / "True.py", None, family_named("serverless"))


@pytest.mark.parametrize("name", ["greedy_qos", "sac_han", "a\nb", "x" * 61, "best (clairvoyant)"])
def test_a_guest_does_not_take_another_policys_name(name: str) -> None:
    with pytest.raises(ValueError, match="policy's name is"):
        evaluate(ENV_ID, [from_callable(lambda o, m: 1, name)], 1, 7, SMALL, guests=IN_PROCESS)


@pytest.mark.parametrize(
    ("trick", "said"),
    [
        ("time.sleep(60)", "'mine' took more than time_limit_s=0.5 s"),
        ("os._exit(3)", "'mine' has ended its process .exit status 3"),
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


def wait_for_the_end_of(pid: str) -> None:
    state = Path("/proc") / pid / "stat"
    for _ in range(6000):  # an orphan is waited for by another, in its own time
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.01)
    pytest.fail("a process of the guest lives on")


def test_a_guests_processes_end_with_it(tmp_path: Path) -> None:
    trace = tmp_path / "helper"
    text = (
        "import subprocess\n"
        f"open({str(trace)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "def act(observation, action_mask):\n    return 1\n"
    )
    evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, SMALL)
    wait_for_the_end_of(trace.read_text())
    guest: Any = GuestPolicy(Same(), None)
    guest._pipe.close()  # as when the evaluator's process is gone
    assert guest._process.wait(10) == -signal.SIGKILL


JUDGE = """
import os, sys, time
from pathlib import Path
from servegym.experiments.evaluation.guest import GuestPolicy
guest = GuestPolicy(Path(sys.argv[1]), None)
guest.reset(1)
guest._ask("act", (None, None, None, None))
"""


def test_a_guest_ends_with_a_judge_that_is_killed(tmp_path: Path) -> None:
    busy = "all(n == 0 for n in iter(int, 1))"  # no signal of Python's reaches it
    file = write(tmp_path, f"def predict(o):\n    print('busy', flush=True)\n    {busy}")
    said: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-P", "-c", JUDGE, str(file)]
    with subprocess.Popen(words, env=paths, **said) as judge:
        assert judge.stdout is not None
        assert judge.stdout.readline() == "busy\n"
        children = Path(f"/proc/{judge.pid}/task/{judge.pid}/children").read_text().split()
        judge.kill()
    assert len(children) == 1
    wait_for_the_end_of(children[0])


def test_a_guest_has_a_folder_of_its_own_for_compiled_code(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", "os.environ['NUMBA_CACHE_DIR']"
    code = f"import os\nopen({str(trace)!r}, 'a').write({folder} + '\\n')\n"
    file = write(tmp_path, f"{code}def act(observation, action_mask):\n    return 1\n")
    policy: Any = resolve(file, None, family_of(ENV_ID))
    shared = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(guests.__file__).parents[2])
    linked = list(Path(policy._compiled).glob("*/*.nb[ci]"))
    assert len(linked) == len(list(shared.rglob("*.nb[ci]")))
    evaluate(ENV_ID, [policy], 2, 7, SMALL)
    assert trace.read_text().split() == [policy._compiled] * 2  # a process an episode
    del policy
    gc.collect()
    assert not Path(trace.read_text().split()[0]).exists()


SAID = {
    "name": "mine",
    "clairvoyant": False,
    "env_view": "graph",
    "needs_env": False,
    "needs_outcomes": False,
    "env_kwargs": {"reward": "qos"},
    "observation_shapes": {"experts": [6, 3]},
}


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ({"source": "servegym"}, "source='servegym'; it must say name, env_view, cl"),
        ({"policy": None, "_batch": 1}, "policy=None;"),
        ({"name": 5}, "name=5; it must"),
        ({"clairvoyant": 0}, "clairvoyant=0"),
        ({"env_kwargs": [["reward", "qos"]]}, "env_kwargs="),
        ({"env_kwargs": {"reward": ["paid_forward"]}}, "env_kwargs="),
        ({"observation_shapes": {"experts": 6}}, "observation_shapes="),
        ({"observation_shapes": {"experts": [[6] * 1000]}}, "observation_shapes="),
    ],
)
def test_what_a_guest_says_of_itself_is_checked(
    monkeypatch: pytest.MonkeyPatch, said: dict, refused: str
) -> None:
    monkeypatch.setattr(GuestPolicy, "_start", lambda self: SAID)
    guest = GuestPolicy(Same(), None)
    assert {field: getattr(guest, field) for field in SAID} == SAID and guest.source == "guest"
    monkeypatch.setattr(GuestPolicy, "_start", lambda self: SAID | said)
    with pytest.raises(PolicyError, match=f"'same' says of itself {refused}") as failed:
        GuestPolicy(Same(), None)
    assert len(str(failed.value)) < 300
    monkeypatch.setattr(GuestPolicy, "_start", lambda self: {"name": "mine"})
    with pytest.raises(PolicyError, match="itself .*=None; it must"):
        GuestPolicy(Same(), None)


def test_a_guest_that_answers_itself_is_not_told_the_seed(tmp_path: Path) -> None:
    text = (
        "import json, socket, struct, sys\nat = sys._getframe()\n"
        "while 'descriptor' not in at.f_locals:\n    at = at.f_back\n"
        "pipe = socket.socket(fileno=at.f_locals['descriptor'])\n"
        f"said = json.dumps(json.loads({json.dumps(SAID)!r}) | {{'source': 'servegym'}}).encode()\n"
        "pipe.sendall(struct.pack('!Q', len(said)) + said)\n"
        "def act(observation, action_mask):\n    return 1\n"
    )
    with pytest.raises(PolicyError, match="itself source"):
        evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, SMALL)


class Pipe:
    """An end that gives a byte a second of its own time, `now`."""

    def __init__(self, content: bytes) -> None:
        self.content, self.now, self.left, self.asked = content, 0.0, 0.0, 0

    def settimeout(self, left: float) -> None:
        self.left = left

    def sendall(self, content: bytes) -> None:
        pass

    def recv(self, size: int) -> bytes:
        self.asked = max(self.asked, size)
        if self.left < 1.0 or not self.content:
            self.now += self.left
            raise TimeoutError
        self.now += 1.0
        part, self.content = self.content[:1], self.content[1:]
        return part

    def close(self) -> None:
        pass


def connected(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> Any:
    """A guest at the other end of a pipe."""
    monkeypatch.setattr(GuestPolicy, "_start", lambda self: SAID)
    guest: Any = GuestPolicy(Same(), None, 30.0)
    guest._pipe, guest._process, guest._news = pipe, None, (None, None)
    guest._parts = {"": spaces.MultiDiscrete([7])}
    return guest


@pytest.mark.parametrize("content", [b"", bytes(7), struct.pack("!Q", 60) + bytes(59)])
def test_a_message_has_one_deadline(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    pipe = Pipe(content)
    monkeypatch.setattr(guests.time, "monotonic", lambda: pipe.now)
    with pytest.raises(PolicyError, match="'mine' took more than time_limit_s=30 s"):
        connected(monkeypatch, pipe)._ask("make", b"")
    assert pipe.now == 30.0


def test_what_a_guest_does_not_read_has_the_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, other = socket.socketpair()
    guest = connected(monkeypatch, pipe)
    guest.time_limit_s = 0.01
    with other, pytest.raises(PolicyError, match="took more than"):
        guest.act(np.zeros(1 << 22), None)


def test_no_message_is_read_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe(struct.pack("!Q", 8 << 30) + b"[" * 100)
    monkeypatch.setattr(guests.time, "monotonic", lambda: pipe.now)
    with pytest.raises(PolicyError, match="it is 8589934592 bytes long; allowed are 65536"):
        connected(monkeypatch, pipe)._ask("make", b"")
    assert len(pipe.content) == 100 and pipe.asked == 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"": ["S2000000000", [1]]}', "integer"),
        ('{"": [[1], ["a"]]}', "numbers are .*str"),
        ('{"": [[1], [NaN]]}', "numbers are .*float"),
        ('{"": [[1], [[1]]]}', "numbers are .*list"),
        ('{"": [[1], [1180591620717411303424]]}', "too large"),
        ('{"": [[1], [' + "9" * 5000 + "]]}", "Exceeds the limit"),
        ('{"": [[1000000000, 1000000000], [1]]}', "cannot reshape"),
        ('{"": [1, 2]}', "not iterable"),
        ('{"plan": [[1], [1]]}', r"the parts \['plan'\]; needed is MultiDiscrete"),
        ("[]", "it is a list"),
        ("nonsense", "Expecting value"),
        ("[" * 60_000, "recursion"),
        ("\udcff", "utf-8"),
    ],
)
def test_an_answer_is_a_few_numbers(
    monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    pipe, other = socket.socketpair()
    answer = content.encode(errors="surrogateescape")
    other.sendall(struct.pack("!Q", len(answer)) + answer)
    with other, pytest.raises(PolicyError, match=f"'mine' gave a wrong answer: .*({said})"):
        connected(monkeypatch, pipe).act(None, None)


def test_floats_are_for_spaces_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, other = socket.socketpair()
    guest = connected(monkeypatch, pipe)
    guest._parts = {"migrate": spaces.MultiDiscrete([2]), "plan": spaces.Box(0, 1, (1, 2))}
    answer = b'{"plan": [[1, 2], [1, 0.5]], "migrate": [[1], [1]]}'
    other.sendall(struct.pack("!Q", len(answer)) + answer)
    action = guest.act(None, None)
    assert action["plan"].tolist() == [[1.0, 0.5]] and action["plan"].dtype == np.float64
    assert action["migrate"].dtype == np.int64
    with other:
        guest._pipe.close()


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
    text = "import time\ndef act(observation, action_mask):\n    time.sleep(0.05)\n    return 1\n"
    world = SMALL | {"episode_requests": 4}
    rows = evaluate(ENV_ID, [write(tmp_path, text)], 2, 7, world, num_envs=2)
    # The rows of a block wait for the whole of it.
    assert all(row["decision_s"] >= 0.1 and row["mean_routing_s"] >= 0.105 for row in rows)


def test_what_a_guest_prints_is_no_part_of_the_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "def act(observation, action_mask):\n    print('x' * 1000)\n    return 1\n"
    evaluate(ENV_ID, [write(tmp_path, text)], 1, 7, SMALL)
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("x") >= 30 * 1000


@pytest.mark.parametrize("wrong", [lambda a: a[:, None], lambda a: a + 99, lambda a: a * 0.5])
def test_a_wrong_action_is_an_error_that_names_the_policy(wrong: Any) -> None:
    class Wrong(Same):
        def act(self, observation: Any, action_mask: Any) -> Any:
            return wrong(super().act(observation, action_mask))

    with pytest.raises(PolicyError, match="'same' acted wrongly"):
        evaluate(ENV_ID, [Wrong()], 1, 7, SMALL, guests=IN_PROCESS)


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


def _step(env: Any, action: Any) -> bool:
    """The same action for whoever acts; whether the episode has ended."""
    if not hasattr(env, "possible_agents"):
        return env.step(action)[2]
    env.step(dict.fromkeys(env.agents, action))
    return not env.agents


def test_expert_placement_hides_it_too() -> None:
    kwargs = {"model": "toy", "epochs": 3, "mean_interarrival_s": 0.3, "epoch_s": 20.0}
    single = gymnasium.make("servegym/ExpertPlacement-v0", **kwargs)
    for env in (single, placement_agents(**kwargs)):
        env.reset(seed=1)
        space = env.action_space("server_0") if hasattr(env, "agents") else env.action_space
        action = {"migrate": 0, "plan": np.zeros(space["plan"].shape, np.float32)}
        _step(env, action)
        log = env.unwrapped.request_log()
        pending = np.isnan(log["finish_s"])
        assert 0 < pending.sum() < len(log)
        for name, value in (("prompt", -1), ("task", -1), ("output_tokens", 0)):
            assert (log[name][pending] == value).all() and (log[name][~pending] != value).all()
        assert not (log["first_token_s"] > 20.0).any()
        _step(env, action)
        _step(env, action)
        assert (env.unwrapped.request_log()["prompt"] >= 0).all()


def test_a_policy_of_the_package_stays_in_process(tmp_path: Path) -> None:
    problem, family = problem_of(ENV_ID, SMALL), family_of(ENV_ID)
    system = describe_system(problem)
    for info in list_policies(family.name):
        policy = resolve(info.name, problem, family, view="flat")
        assert policy.source == "servegym" and policy.env_view == "graph", info.name
    assert resolve(RoundRobin(system), problem, family).source == "servegym"
    file = write(tmp_path, "def act(observation, action_mask):\n    return 1\n")
    for guest in (from_callable(lambda o, m: 1, "mine"), file, policy_from_file(file, system)):
        policy = resolve(guest, problem, family, guests=IN_PROCESS)
        assert policy.source == "guest in process"
        assert resolve(policy, problem, family) is policy
