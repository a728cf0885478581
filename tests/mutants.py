"""Mutants of the engines: changes of one line each that the quick tests must notice.

``make test-mutants`` applies each to a copy of the tree and runs there, uncompiled, the test that
is named with it. It fails if a mutant survives, if a test fails on the unchanged copy, or if a text
to be replaced is not in its file exactly once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("envs", "hardware_profiles", "baselines", "agents", "experiments", "tests")


class Mutant(NamedTuple):
    """A change of an engine, and the test of its family that fails then."""

    family: str
    file: str  # in its ``kernel``
    old: str  # is there once
    new: str
    test: str  # without a file: in ``test_kernel_reference.py``

    @property
    def path(self) -> Path:
        """The file, from the root of the tree."""
        return Path("envs", self.family, "kernel", self.file)

    @property
    def node(self) -> str:
        """The test, as pytest names it from the root of the tree."""
        test = self.test if "::" in self.test else f"test_kernel_reference.py::{self.test}"
        return f"tests/envs/{self.family}/{test}"


ROUTING, SERVERLESS, PLACEMENT = "llm_routing", "serverless_moe", "expert_placement"
PREFIX = "prefix_routing"
BINDS = "test_equal_when_memory_binds"
AHEAD = "test_equal_when_iterations_are_planned_ahead"
PLAY = "test_random_play_costs_what_the_equations_say"
LOOK = "test_equal_to_the_reference_at_every_look"
STAGED = "test_a_queue_behind_the_staging_does_not_count"
LEAVE = "test_requests_that_leave_their_server"
INDEXED = "test_gateway.py::test_kernel_equals_plain_objects"
CACHED = "test_offload.py::test_equal_to_the_reference_at_every_look"
LIMIT = "test_env.py::test_a_request_exactly_at_its_limit_keeps_it"
OBJECTIVE = "test_env.py::test_a_request_exactly_at_its_objective_keeps_it"
NEAREST = "test_weights_come_from_the_nearest_server_and_of_equals_from_the_first"
MOVES = "test_a_migration_moves_the_bytes_of_its_loads"
INSTANT = "test_what_arrives_at_an_instant_comes_before_what_ends_then"
IN_ORDER = "test_requests_file.py::test_requests_of_one_instant_are_served_in_order"
FAILING = "test_equal_with_failing_experts"
ON_TIME = "test_requests_file.py::test_an_answer_exactly_at_the_requirement_is_on_time"
WARM = "test_env.py::test_warm_functions_save_the_start"
IDLE = "test_env.py::test_a_function_idle_for_exactly_the_keep_alive_time_is_warm"
BY_TIME = "test_events_come_by_time_and_then_in_order_of_arrival"
DOWN = "test_equal_with_failing_replicas"
EQUAL = "test_equal_to_the_reference"
WHOLE = "test_env.py::test_requests_that_take_all_of_the_memory_are_served"

CHANGES = {
    (ROUTING, "scheduler.py"): [
        # A block too many where the tokens fill their blocks.
        ("config.block_size - 0.5", "config.block_size + 0.5", BINDS),
        # A request taken from the middle of the heap leaves one that ends sooner below a later one.
        ("        if place > 0 and _comes", "        if place < 0 and _comes", BINDS),
        # Of requests that become available at one instant the last goes first.
        ("ahead).available > request.available", "ahead).available >= request.available", IN_ORDER),
        # The next chunk of a prompt has the tokens of the decodes, too.
        ("config.token_budget - replica.decoding)", "config.token_budget)", AHEAD),
    ],
    (ROUTING, "queues.py"): [
        # Preemption frees the oldest request's blocks.
        ("        slot = expert.newest\n", "        slot = expert.oldest\n", BINDS),
        (">= config.waiting_capacity or expert.down != 0", ">= config.waiting_capacity", FAILING),
    ],
    (ROUTING, "iterations.py"): [
        # Nobody gets the last block.
        ("blocks_of(config, need) <= expert.free", "blocks_of(config, need) < expert.free", BINDS),
        ("expert.reserved + longest", "expert.reserved", BINDS),
        ("budget = config.token_budget - expert.decoding", "budget = config.token_budget", AHEAD),
        # Planned ahead, an iteration takes who arrived since, and slots that have become free.
        ("request.available > planned", "request.available > now", AHEAD),
        (
            "if config.async_scheduling:\n            request =",
            "if False:\n            request =",
            AHEAD,
        ),
        # Decode iterations run past the one in which the next request has its last token.
        ("next_finish - expert.emitted - 1\n", "next_finish - expert.emitted\n", BINDS),
        # What is exactly on the limit, or fills it exactly, is beyond it.
        ("latency <= env.latency_requirement", "latency < env.latency_requirement", ON_TIME),
    ],
    (ROUTING, "__init__.py"): [
        ("loss -= _late_scores(", "loss += _late_scores(", "test_equal_in_every_mode")
    ],
    (SERVERLESS, "planning.py"): [
        # Ties of longest processing time go to the last replica.
        ("if busy_s[j] < busy_s[best]", "if busy_s[j] <= busy_s[best]", PLAY),
        # The experts are not assigned anew to one more replica.
        ("if plan.replicas != z:", "if plan.replicas > z + 1:", PLAY),
        ("law[middle].mb >= need", "law[middle].mb > need", PLAY),
        # Two plans under one key.
        ("(q * 2 + choice.order)", "(q + choice.order)", "test_known_plans_are_those_made_anew"),
        # Functions of another memory count as warm.
        ("warm and e.main_mb == main.mb", "warm and e.main_mb >= main.mb", WARM),
        ("e.idle_s <= c.keep_alive_s", "e.idle_s < c.keep_alive_s", IDLE),
    ],
    (SERVERLESS, "service.py"): [
        # Some warm replicas spare all others the start.
        ("max(planned.replicas - function.replicas, 0)", "0", PLAY),
        ("log.ttft_s > request", "log.ttft_s >= request", LIMIT),
        ("log.tpot_s > request", "log.tpot_s >= request", LIMIT),
    ],
    (SERVERLESS, "cost.py"): [
        # A whole number of steps is billed as one more.
        ("np.ceil(steps - 1e-9)", "np.ceil(steps + 1e-9)", PLAY),
        # Warm functions are billed a start, or cold ones none.
        ("if c.bill_cold_start:", "if not c.bill_cold_start:", PLAY),
        ("return remote, call_s + trem_s", "return remote, call_s", PLAY),
        ("invoked = invoked + tokens[r] * calls", "invoked = invoked + tokens[r]", PLAY),
        ("np.maximum(slowest_s, seconds)", "slowest_s + seconds", PLAY),
    ],
    (SERVERLESS, "routing.py"): [
        # Decoding begins with the prompt's tokens.
        ("(np.int64(request.offset) + request.n_in)", "np.int64(request.offset)", PLAY),
    ],
    (PLACEMENT, "routing.py"): [
        # Of servers of equal value the farthest takes the request.
        ("latency < plant.pair[n, best].latency", "latency > plant.pair[n, best].latency", LEAVE)
    ],
    (PLACEMENT, "forwarding.py"): [
        # Paths leave out the links' latency.
        ("c.message_cost + pair.latency", "c.message_cost", LEAVE)
    ],
    (PLACEMENT, "caching.py"): [
        # Fetches of a GPU pass one another.
        ("max(now, gpu.channel_free) + c.fetch", "now + c.fetch", CACHED),
        # Of cached experts that are worth the same the last goes first.
        ("if found < 0 or worth < least", "if found < 0 or worth <= least", CACHED),
    ],
    (PLACEMENT, "migration.py"): [
        # The last copy of an expert is given up.
        ("st.copies[d] > 1", "st.copies[d] > 0", LOOK),
        # A GPU loads into free slots alone.
        ("i == total or gpu.used > slots", "i == total or gpu.used >= slots", LOOK),
        # Of sources that are equally near the last goes first, or who has had it longest.
        ("(this.latency, s) < (other", "(this.latency, -s) < (other", NEAREST),
        ("this.byte_s == other.byte_s and", "this.byte_s < other.byte_s and", NEAREST),
        # Loads from another server are not counted, or an expert counts as one chunk.
        ("    m.weight_bytes += c.expert", "    m.weight_bytes += 0 * c.expert", MOVES),
        ("    gpu.bytes_left -= size\n", "    gpu.bytes_left = 0.0\n", MOVES),
    ],
    (PLACEMENT, "events.py"): [
        # Events of one time go by the last made.
        ("event_key[up] < key", "event_key[up] > key", BY_TIME),
    ],
    (PLACEMENT, "calls.py"): [
        # Ties, and the choice at random, go to the first holder.
        ("best = scratch.expert[i].holder\n    if", "best = st.holders[expert, 0]\n    if", LOOK),
        # The estimate of a call leaves out the staging of its activations.
        ("start = max(sent + hop.there + stage,", "start = max(sent + hop.there,", STAGED),
    ],
    (PREFIX, "cache.py"): [
        # A full hit computes nothing.
        ("request.generated - 1)", "request.generated)", BINDS),
        # Of the hits only those that two others reference take no free block.
        ("index).references > 0\n", "index).references > 1\n", BINDS),
        # Blocks without id are the last to be taken.
        ("    if block.id >= 0:\n        block.", "    if block.id >= -1:\n        block.", BINDS),
        # The beginning of a prefix is freed, and so evicted, before its end.
        ("range(left - 1, -1, -1)", "range(left)", BINDS),
        # Of twins the one that got the id last is found.
        (" after = block.twin_after\n", " after = block.twin_before\n", BINDS),
        # The head of the queue stays out though another request has filled the block it misses.
        ("if replica.blocked_id == content:", "if replica.blocked_id == content < 0:", BINDS),
    ],
    (PREFIX, "iterations.py"): [
        # Prefills take the budget as if nobody decoded.
        ("config.token_budget - replica.decoding\n", "config.token_budget\n", BINDS),
        # Planned ahead, a block is cached before its last token is known.
        ("tokens - config.async_scheduling", "tokens", AHEAD),
    ],
    (PREFIX, "queues.py"): [
        # The token that a preempted request was about to put in counts as lost.
        ("    request.lost = request.computed", "    request.lost = request.computed + 1", BINDS),
    ],
    (PREFIX, "events.py"): [
        # The first of two that arrive at one moment is admitted alone.
        ("safe >= request_of", "safe > request_of", EQUAL),
        # Replicas that are down take requests.
        ("if replica.down == 0 and need", "if replica.down >= 0 and need", DOWN),
        ("safe = min(replica.safe, replica.end)", "safe = min(replica.safe, np.inf)", EQUAL),
        ("need <= replica.capacity", "need < replica.capacity", WHOLE),
    ],
    (PREFIX, "gateway.py"): [
        # An entry that was used again goes as early as if it had not been.
        ("gateways.stamp[row, number, key] == oldest", "gateways.holders[row, key] & bit", INDEXED),
        # A match goes on behind a gap.
        ("if config.strict == 1:", "if config.strict == 2:", INDEXED),
        # Cache events are known at once.
        ("event.time + config.delay_s > now", "event.time > now", INDEXED),
        # A request that is lost before its first token leaves its prefill behind.
        ("if request.in_flight == 2:\n        r", "if request.in_flight == 3:\n        r", INDEXED),
        # Shared blocks are given up with the first request that has them.
        (
            "key < 0 or gateways.references[row, number, key] == 0:",
            "key < 0 or gateways.references[row, number, key] >= 0:",
            INDEXED,
        ),
    ],
    (PREFIX, "steps.py"): [
        ("in_time = ttft <= s", "in_time = ttft < s", OBJECTIVE),
        ("request.first <= settings", "request.first < settings", OBJECTIVE),
    ],
    (PLACEMENT, "simulation.py"): [
        # What ends at an instant goes before what arrives then; an epoch leaves out its last
        # instant.
        ("arrival <= now", "arrival < now", INSTANT),
        ("now > until", "now >= until", INSTANT),
    ],
}
"""By family and file: the text, what takes its place, the test."""

MUTANTS = [Mutant(*where, *change) for where, some in CHANGES.items() for change in some]


def copy_tree(to: Path) -> None:
    """Copy the tree, and put its packages where ``import servegym`` finds them."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, to / name)
    packages = tomllib.loads((to / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = dict(packages["package-dir"])
    site = to / "site" / "servegym"
    site.mkdir(parents=True)
    for file in (to / folders.pop("servegym")).iterdir():
        (site / file.name).symlink_to(file)
    for name, folder in folders.items():
        (site / name.removeprefix("servegym.")).symlink_to(to / folder)


def run_tests(tree: Path, nodes: list[str]) -> tuple[int, str]:
    """Run tests of a tree with its engines uncompiled; pytest's exit status and its output."""
    settings = {
        "PYTHONPATH": str(tree / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file of the same size and second would look the same
        "NUMBA_DISABLE_JIT": "1",
    }
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout=120", "--tb=line"]
    options += ["-m", "not slow", "--hypothesis-profile=mutants"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "setup.cfg", "--rootdir=.", *options, *nodes],
        cwd=tree,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Try every mutant whose description has one of the words given, all if there is none."""
    chosen = [
        mutant
        for mutant in MUTANTS
        if len(sys.argv) < 2 or any(word in " ".join(mutant) for word in sys.argv[1:])
    ]
    if not chosen:
        print(f"no mutant has one of {sys.argv[1:]} in its description")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        status, output = run_tests(tree, sorted({mutant.node for mutant in chosen}))
        if status != 0:
            print(output)
            print("the tests fail without any mutant")
            return 1
        survivors = 0
        for mutant in chosen:
            file = tree / mutant.path
            before = file.read_text()
            if before.count(mutant.old) != 1:
                print(f"{mutant.path}: {mutant.old!r} is there {before.count(mutant.old)} times")
                return 1
            file.write_text(before.replace(mutant.old, mutant.new))
            begun = time.perf_counter()
            status, output = run_tests(tree, [mutant.node])
            file.write_text(before)
            if status not in (0, 1):
                print(output)
                print(f"{mutant.path}: the tests do not run with {mutant.new!r}")
                return 1
            survivors += status == 0
            said = "caught" if status else "SURVIVED"
            seconds = time.perf_counter() - begun
            change = f"{mutant.old.strip()!r} -> {mutant.new.strip()!r}"
            print(f"{said:8} {seconds:5.1f} s  {mutant.path}: {change}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
