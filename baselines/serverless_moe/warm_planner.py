"""A planner for what stays warm: value iteration over warm configurations and overhead regimes.

It sees what a controller sees. Before the first request it plans on requests of the train split;
at a request it adds what the configuration it leaves behind is worth to the reward expected now.

The chain that is solved: a request comes, drawn from the sample; it finds configuration ``a``
warm with chance ``p`` if ``a`` served the last one, else nothing; the regime ``r`` of the last
overhead is known, that of the request itself is not. With ``C_i(r, a)`` the reward of request i
with a cold start, ``W_i(r, a)`` with everything warm (both expected over the regime to come),
``F_i(r)`` the best cold one that leaves nothing of use, and ``T`` the switching of regimes,

    D(r, a) = p E_i[max(0, W_i(r, a) + (T D)(r, a) - B_i(r))]
    B_i(r) = max(F_i(r), max_a C_i(r, a) + (T D)(r, a))

iterated from D = 0. D is the difference of the relative values of average-reward dynamic
programming with ``a`` and with nothing warm; the values themselves are not needed, because no
action changes the regime. As nothing is warm with chance 1 - p, each iteration shrinks the error
(the span over what is warm) by p.

Approximate are: only the same global action in the shared order counts as warm (the memory that an
action stands for varies with the prompt; a warm main function under another action is worth
nothing, in the plan alone), and rewards are those of `ActionTable`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from servegym.baselines.serverless_moe.base import Actions, Observed, ServerlessPolicy, best_action
from servegym.baselines.serverless_moe.system import ServerlessSystem
from servegym.envs.serverless_moe.loads import Load

Floats = NDArray[np.float64]
MOST_CHANCE = 0.99
"""Chance of finding things warm is taken as no more, so that the iteration ends."""


def relative_values(
    free: Floats,
    cold: Floats,
    warm: Floats,
    *,
    chance: float,
    switching: Floats,
    tolerance: float = 1e-5,
) -> tuple[Floats, Floats]:
    """Value iteration over what is warm; the equations are at the top of the file.

    ``free`` (n, R) is the best reward of each request with a cold start that leaves nothing of use,
    ``cold`` and ``warm`` (n, R, A) that with each configuration started and warm, ``chance`` in [0,
    1) that a request finds warm what served the last one, ``switching`` (R, R) the probabilities of
    the next regime, and ``tolerance`` the largest error of a worth.

    Returns:
        ``worth`` (R, A): how much more all later requests bring if the configuration has served
        the last request, which was in regime r, than if nothing of use has; and ``cold_value``
        (R,): mean over the requests of ``B``. Its mean over the stationary regimes is the greatest
        average reward.
    """
    worth = np.zeros(cold.shape[1:])
    # Error after a change: at most change * p / (1 - p), twice that for the two ends of the span.
    small = tolerance * (1.0 - chance) / 2.0
    while True:
        later = switching @ worth
        value = np.maximum(free, (cold + later).max(axis=2))
        saved = warm + later
        saved -= value[:, :, None]
        new = chance * np.maximum(saved, 0.0, out=saved).mean(axis=0)
        change = float(np.abs(new - worth).max())
        worth = new
        if change <= small:
            return worth, value.mean(axis=0)


def regime_transitions(system: ServerlessSystem) -> Floats:
    """(R, R) probability of the next overhead regime: one of the others with ``trem_switch``."""
    count, leaves = len(system.mean_trem_s), system.arguments.trem_switch
    if count == 1:
        return np.ones((1, 1))
    other = leaves / (count - 1)
    return np.full((count, count), other) + np.eye(count) * (1.0 - leaves - other)


def train_requests(system: ServerlessSystem, requests: int) -> list[Observed]:
    """Requests of the train split as a policy would see them, nothing warm.

    They are drawn from the environment of ``system.arguments``, whatever split these name.
    """
    from servegym.envs.serverless_moe.config import problem_of
    from servegym.envs.serverless_moe.core import ServerlessBatch
    from servegym.envs.serverless_moe.kernel import layout

    changes = {"split": "train", "episode_requests": requests, "view": layout.DICT}
    problem = problem_of(replace(system.arguments, **changes))
    batch = ServerlessBatch(problem, 1)
    batch.draw(0, np.random.default_rng(0))
    return [
        Observed(
            frequency=problem.predicted[int(drawn["prompt"])],
            n_in=int(drawn["n_in"]),
            n_out=max(1, round(float(drawn["n_out_predicted"]))),
            ttft_limit_s=float(drawn["ttft_limit"]),
            tpot_limit_s=float(drawn["tpot_limit"]),
            last_trem_s=0.0,
            warm=None,
        )
        for drawn in batch.arrays.requests[0]
    ]


class WarmPlanner(ServerlessPolicy):
    """Greatest expected reward now and worth of what it leaves warm, by value iteration.

    It takes its statistics from requests drawn from the train split (what is predicted of them,
    not their routing) and from the system's constants: the chance that functions stay warm and the
    regimes of the overhead. Of an episode it reads the observation alone.

    With an action a layer every layer takes the same step, as in the other policies that value all
    global actions.

    Args:
        system: The system.
        requests: Train requests that it plans on.
    """

    name = "warm_planner"

    def __init__(self, system: ServerlessSystem, *, requests: int = 200) -> None:
        super().__init__(system)
        self._switching = regime_transitions(system)
        self.chance = min(system.reuse_chance(), MOST_CHANCE)
        tables = [
            [
                np.array(
                    [self.rewards(request, load, starts=starts) for load in self._loads(request)]
                )
                for starts in (True, False)
            ]
            for request in train_requests(system, requests)
        ]
        count, shape = len(self._switching), tables[0][0].shape  # (R, levels, 2, W, Y, Z)
        # Expected over the regime of the request, given the last one's.
        cold, warm = (
            np.array([np.tensordot(self._switching, table[k], axes=1) for table in tables])
            for k in (0, 1)
        )
        worth, _ = relative_values(
            cold[:, :, :, 0].reshape(requests, count, -1).max(axis=2),
            cold[:, :, :, 1].reshape(requests, count, -1),
            warm[:, :, :, 1].reshape(requests, count, -1),
            chance=self.chance,
            switching=self._switching,
        )
        self.worth = np.zeros(shape)
        """(R, levels, 2, W, Y, Z): worth of leaving an action's configuration warm; 0 in the
        prompt's order."""
        self.worth[:, :, 1] = worth.reshape(count, shape[1], *shape[3:])

    def _loads(self, observed: Observed) -> list[Load]:
        """The expected load in each regime of the overhead."""
        model, sigma = self.system.model, self.system.arguments.trem_sigma
        request, mean = (observed.frequency, observed.n_in, observed.n_out), self.system.mean_trem_s
        return [Load.predicted(model, *request, float(trem), trem_sigma=sigma) for trem in mean]

    def decide(self, row: int, observed: Observed, legal: NDArray[np.bool_]) -> Actions:
        """See `ServerlessPolicy.decide`."""
        chance = self._switching[self.system.regime(observed.last_trem_s)]
        now = np.array([self.rewards(observed, load) for load in self._loads(observed)])
        return best_action(np.einsum("r,r...->...", chance, now + self.worth), legal)
