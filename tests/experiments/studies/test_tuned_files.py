"""The learner that begins at a gateway's file."""

import gymnasium
import torch

from servegym.baselines.prefix_routing import PrefixSystem, plugins
from servegym.baselines.prefix_routing.policy import BatchView
from servegym.experiments.studies.prefix.learning import ENV_ID, SUMMARY_ID
from servegym.experiments.studies.prefix.tuned_files import HEAT, FromFile


def test_the_network_of_a_file_begins_with_its_scores():
    arguments = {"scenario": "mixed-cards", "rate": 40.0, "episode_requests": 80}
    system = PrefixSystem.from_kwargs(**arguments)
    cards = dict.fromkeys(system.cards)
    weights = {f"{plugins.CARDS}.{card}": 0.5**k for k, card in enumerate(cards)}
    setting = {**plugins.SCORES, "active-request-scorer": 4.0, "token-load-scorer": 6.0}
    setting |= {"token-load-scorer.queueThresholdTokens": 20_000.0, plugins.CARDS: 7.0, **weights}
    seen, known = (gymnasium.make(name, **arguments) for name in (SUMMARY_ID, ENV_ID))
    net = FromFile(system, setting, seen.observation_space.shape, 8, 16, first=0)
    rows, info = seen.reset(seed=5)
    columns, _ = known.reset(seed=5)
    for _ in range(80):
        mask = info["action_mask"][None]
        view = BatchView({k: x[None] for k, x in columns.items()}, mask, system, None)
        cost, _ = plugins.llm_d(view, view.up, setting)
        x = net.moments(torch.as_tensor(rows)[None])
        log_pi, _ = net(x, torch.as_tensor(mask))
        torch.testing.assert_close(log_pi, torch.as_tensor(-cost / HEAT).log_softmax(-1).float())
        action = int(log_pi.argmax())
        (rows, *_, info), (columns, *_) = seen.step(action), known.step(action)
