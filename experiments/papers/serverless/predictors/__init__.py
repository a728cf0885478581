"""Prediction of expert activations from a prompt's embedding (Sec. IV-B, V-B).

Every predictor is fitted on historical prompts, their vectors ``(P, d)`` and shares ``(P, L, K)``
of the calls of a layer that each expert gets, and returns such shares for new vectors::

    predictor = PREDICTORS["sps"](alpha=5, beta=60).fit(vectors, shares)
    shares = predictor.predict(new_vectors)

| name | prediction |
|---|---|
| bf | softmax-weighted mean of the ``alpha`` most similar prompts, found by brute force |
| sps | the same of the prompts that Algorithm 1 finds in a tree of k-medoids |
| varpam | SPS with a tree of Partitioning Around Medoids |
| dop | mean activation of all historical prompts |
| fate | a linear softmax gate a layer on the prompt's embedding |
| category | mean activation of the prompt's task; not the paper's |

Fate's gates are the model's own in the paper and read the embedding in place of the layers' inputs;
recordings do not hold these weights, so here they are fitted to the history, which favours Fate.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from servegym.envs.workloads.activations import Activations
from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    Array,
    BruteForce,
    Indexes,
    SimilarPromptsSearch,
    VarPAM,
)
from servegym.experiments.papers.serverless.predictors.without_search import (
    CategoryMean,
    DistributionOnly,
    Fate,
)

PREDICTORS: dict[str, Callable[..., Any]] = {
    "bf": BruteForce,
    "sps": SimilarPromptsSearch,
    "varpam": VarPAM,
    "dop": DistributionOnly,
    "fate": Fate,
    "category": CategoryMean,
}
"""Predictors by name."""


def fitted(
    activations: Activations, embedding: str, name: str, **settings: Any
) -> Callable[[Indexes], Array]:
    """A predictor of `PREDICTORS` fitted to the train split: prompts ``(Q,)`` -> ``(Q, L, K)``.

    ``embedding`` is a key of the recordings' embeddings, zeros where they lack it.
    """
    train, shares, task = activations.rows("train"), activations.frequencies(), activations.task
    vectors = activations.embeddings.get(embedding, np.zeros((len(shares), 1)))
    predictor = PREDICTORS[name](**settings).fit(vectors[train], shares[train], task[train])
    return lambda prompts: predictor.predict(vectors[prompts], task[prompts])
