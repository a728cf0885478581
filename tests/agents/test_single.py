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


@pytest.mark.parametrize("head", ["expert", "arrived"])
def test_logits_equal_the_networks(random_obs, head):
    torch.manual_seed(3)
    layout = sac_han.Layout(4, 3, 2)
    net = sac_han.Agent(layout, sac_han.Args(law=False, head=head), None).eval()
    single = SingleDecision(net)
    obs = random_obs(40, 4, 3, 2, seed=5, empty=(0, 7))
    mask = (np.random.default_rng(1).random((40, 5)) < 0.7).astype(np.int8)
    mask[:, 0] = 1
    for i in range(40):
        rows = layout.rows({key: value[i : i + 1] for key, value in obs.items()})
        with torch.inference_mode():
            wanted = net.actor(*net.encode(torch.as_tensor(rows).float()))[0].numpy()
        np.testing.assert_allclose(single.logits(rows, layout), wanted, atol=2e-5)


def test_a_loaded_policy_decides_the_same_one_by_one(tmp_path):
    """With the laws and the impact features, over an episode's changing load."""
    torch.manual_seed(4)
    args = sac_han.Args(rate_low=10.0, rate_high=10.0)
    system = RoutingSystem.from_kwargs(profiles=args.profiles)
    net = sac_han.Agent(sac_han.Layout(6, 5, 5, impact=True), args, system)
    for weight in net.parameters():  # untrained heads hardly differ between experts
        weight.data *= 2.0
    path = tmp_path / "policy.safetensors"
    sac_han.save_policy(net, args, path)
    policy = load_policy(path)
    assert policy.single is not None
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
