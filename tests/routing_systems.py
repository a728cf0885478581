"""Routing systems by hand, and what is seen of them at random."""

import numpy as np

from servegym.baselines.llm_routing.system import NO_SCORE, Library, RoutingSystem, TrainRequests

RUNNING, WAITING = 5, 5


def linear_system(law, mean_score=None, mean_output_tokens=None, train=None, **kwargs):
    """A system of N experts with ``law`` (N, 4): base_s, k1, k2, seconds a sequence.

    ``prefill_s(P) = base + k1 P`` and ``decode_s(b, T) = base + kb b + k2 T``. Memory is no limit,
    and unless ``train`` says more prompts have 50 tokens and nothing is predicted.
    """
    law = np.asarray(law, dtype=np.float64)
    base, k1, k2, kb = (law[:, k, None, None] for k in range(4))
    train = train or TrainRequests(np.array([50.0]), *np.zeros((4, 1, len(law))))
    kwargs = {"kv_capacity_tokens": np.full(len(law), 1e6), **kwargs}
    batch, grid = np.arange(RUNNING + 1.0)[:, None], np.array([0.0, 8192.0])
    library = Library(
        estimator=law,
        prefill_tokens=grid,
        prefill_s=(base + k1 * grid)[:, 0],
        context_tokens=grid,
        decode_s=base + kb * batch + k2 * batch * grid,
        mean_score=np.array([NO_SCORE] * len(law) if mean_score is None else mean_score),
        mean_output_tokens=np.array(mean_output_tokens or [150.0] * len(law)),
        train=train,
    )
    experts = tuple(f"expert {n + 1}" for n in range(len(law)))
    return RoutingSystem(experts, RUNNING, WAITING, library, **kwargs)


def make_observation(rng, batch=16, num_experts=6, limit=0.03, least_running=0, slots=(5, 5)):
    """A plausible batch of observations and masks; some experts, and some whole rows, are full."""
    most, queued = slots
    running = rng.integers(least_running, most + 1, (batch, num_experts))
    waiting = np.where(running == most, rng.integers(0, queued + 1, running.shape), 0)
    full = rng.random(batch) < 0.15
    running[full], waiting[full] = slots
    mask = np.ones((batch, num_experts + 1), np.int8)
    mask[:, 1:] = waiting < queued

    def rows(count, size, started):
        shape = (batch, num_experts, size)
        length = rng.uniform(2, 300, shape)
        done = 1 + rng.random(shape) * (length - 2) if started else np.zeros(shape)
        out = np.stack(
            [rng.integers(5, 400, shape), rng.random(shape), length]
            + [rng.random(shape) / 10, done, rng.uniform(0.01, 0.05, shape)],
            axis=-1,
        ).astype(np.float32)
        present = np.arange(size) < count[..., None]
        return out * present[..., None], present.astype(np.int8)

    prompt = np.repeat(rng.integers(5, 400, (batch, 1)), num_experts, axis=1)
    shape = prompt.shape
    observation = {
        "request": np.stack([prompt, rng.random(shape), rng.integers(2, 300, shape)], axis=-1),
        "experts": np.stack([rng.random(shape), running, waiting], axis=-1),
        "latency_requirement": np.full((batch, 1), limit),
        "load": np.tile([0.125, 60.0, 150.0], (batch, 3, 1)),
    }
    observation = {key: value.astype(np.float32) for key, value in observation.items()}
    observation["running"], observation["running_mask"] = rows(running, most, True)
    observation["waiting"], observation["waiting_mask"] = rows(waiting, queued, False)
    return observation, mask
