"""The numpy path of one decision against the torch network."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
pytest.importorskip("safetensors")
pytest.importorskip("rich")

from servegym.agents import load_policy, sac_han  # noqa: E402
from servegym.agents.lib.single_decision import SingleDecision  # noqa: E402
from servegym.baselines.llm_routing.system import RoutingSystem  # noqa: E402
from servegym.experiments.evaluate import make_envs  # noqa: E402


def test_logits_equal_the_networks(random_obs):
    torch.manual_seed(3)
    system = RoutingSystem.from_kwargs(num_experts=4, running_capacity=3, waiting_capacity=2)
    net = sac_han.Agent(sac_han.Args(prior=0.5), system).eval()
    single = SingleDecision(net, sac_han.heuristic_values)
    obs = random_obs(40, 4, 3, 2, seed=5, empty=(0, 7))
    for i in range(40):
        rows = net.rows({key: value[i : i + 1] for key, value in obs.items()})
        with torch.inference_mode():
            h = net.encode(torch.as_tensor(rows).float())
            wanted = net.log_policy(h, torch.ones(1, 5))[0].numpy()
        logits = torch.from_numpy(single.logits(rows, net.layout))
        np.testing.assert_allclose(logits.log_softmax(-1).numpy(), wanted, atol=2e-5)


def test_a_loaded_policy_decides_the_same_one_by_one(tmp_path):
    """With the laws and the impact features, over an episode's changing load."""
    torch.manual_seed(4)
    args = sac_han.Args()
    net = sac_han.Agent(args, RoutingSystem.from_kwargs(**sac_han.ENV))
    for weight in net.parameters():  # untrained heads hardly differ between experts
        weight.data *= 2.0
    path = tmp_path / "policy.safetensors"
    sac_han.save_policy(net, args, path)
    policy = load_policy(path)
    envs = make_envs("servegym/LLMRouting-v0", 1, {"episode_requests": 150, "rate": 10.0})
    obs, info = envs.reset(seed=[3])
    seen, taken = [], []
    for _ in range(150):
        mask = info["action_mask"]
        seen.append(({key: value.copy() for key, value in obs.items()}, mask.copy()))
        taken.append(int(policy.act(obs, mask)[0]))
        obs, _, _, _, info = envs.step(np.array(taken[-1:]))
    batch = {key: np.concatenate([o[key] for o, _ in seen]) for key in seen[0][0]}
    masks = np.concatenate([mask for _, mask in seen])
    together = policy.act(batch, masks)
    assert together.tolist() == taken
    assert len(set(taken)) > 1
    assert masks[np.arange(150), taken].all()
