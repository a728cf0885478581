"""A Minari data set recorded from a baseline, by Minari's own collector."""

import numpy as np
import pytest

pytest.importorskip("minari", reason="Minari is not installed")
pytest.importorskip("h5py", reason="Minari stores in HDF5: pip install 'minari[hdf5]'")

import minari

from servegym.baselines.registry import describe_system, make_policy
from servegym.envs.families import family_of
from servegym.experiments.evaluation.evaluate import evaluate

from .settings import SMALL, STEPS, make

SEED, EPISODES = 50, 3


@pytest.mark.parametrize(
    "env_id, name",
    [
        ("servegym/LLMRouting-v1", "priced_greedy"),
        ("servegym/ServerlessMoE-v0", "greedy_warm"),
        ("servegym/ExpertPlacement-v0", "uniform"),
    ],
)
def test_a_data_set_of_a_baseline(env_id, name, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    family = family_of(env_id)
    system = describe_system(make(env_id).unwrapped.problem, family=family.name)
    policy = make_policy(name, system, family=family.name)
    plain = make(env_id, split="eval", **policy.env_kwargs)
    env = minari.DataCollector(plain, record_infos=False)
    for seed in range(SEED, SEED + EPISODES):
        observation, info = env.reset(seed=seed)
        policy.reset(1, seed=seed)
        ended = False
        while not ended:
            mask = info.get("action_mask")
            batch = {key: np.asarray(part)[None] for key, part in observation.items()}
            actions = policy.act(batch, None if mask is None else mask[None])
            one = {k: v[0] for k, v in actions.items()} if isinstance(actions, dict) else actions[0]
            observation, reward, ended, _, info = env.step(one)
            policy.feedback(np.array([reward]))
    told = f"servegym/{family.name.replace('_', '-')}/{name.replace('_', '-')}-v0"
    env.create_dataset(
        told,
        algorithm_name=name,
        description="A baseline's episodes.",
        author="servegym",
        author_email="x@y.z",
        code_permalink="none",
        eval_env=plain.spec,
    )

    data = minari.load_dataset(told)
    assert data.total_episodes == EPISODES and data.total_steps == EPISODES * STEPS[env_id]
    rows = evaluate(
        env_id, [name], episodes=EPISODES, seed=SEED, env_kwargs=SMALL[env_id], num_envs=1
    )
    returns = [float(episode.rewards.sum()) for episode in data.iterate_episodes()]
    assert returns == pytest.approx([row["return"] for row in rows], abs=1e-5)
    assert len(set(returns)) == EPISODES
    again = data.recover_environment()
    assert again.spec.id == env_id
    # The recorded actions, replayed where they came from, are paid the same.
    episode = next(data.iterate_episodes([1]))
    again.reset(seed=SEED + 1)
    for t, reward in enumerate(episode.rewards):
        action = episode.actions
        one = {k: v[t] for k, v in action.items()} if isinstance(action, dict) else action[t]
        assert again.step(one)[1] == pytest.approx(float(reward), abs=1e-6)
