"""Made-up histories of prompts, and their similarity by Eq. 11."""

import numpy as np

WIDTH = 12


TREES = ["sps", "vared", "varpam"]


def made_up(prompts=240, layers=3, experts=6, topics=5, noise=0.3, seed=0):
    """Embeddings and activations that both depend on a topic and on a place within it."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(topics, size=prompts)
    place = rng.normal(size=(prompts, 2))
    to_embedding = rng.normal(size=(2, WIDTH))
    to_logits = rng.normal(size=(2, layers * experts))
    embeddings = rng.normal(size=(topics, WIDTH))[topic] * 2 + noise * place @ to_embedding
    logits = rng.normal(size=(topics, layers * experts))[topic] + noise * place @ to_logits
    calls = np.exp(logits).reshape(prompts, layers, experts)
    return embeddings, calls / calls.sum(axis=2, keepdims=True), topic


def soft_cosine(first, second, sigma=1e-12):
    """Eq. 11 from pooled vectors (P, d) and (Q, d): (P, Q)."""
    norms = np.outer(np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1))
    return first @ second.T / (norms + sigma)
