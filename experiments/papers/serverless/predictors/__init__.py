"""Prediction of expert activations from a prompt's embedding (Sec. IV-B, V-B).

Every predictor is fitted on historical prompts and returns, for new ones, the share of the calls
of a layer that each expert gets: ``(Q, L, K)``, each layer summing to 1. Use::

    predictor = PREDICTORS["sps"](alpha=5, beta=60)
    predictor.fit(embeddings, activations)
    shares = predictor.predict(new_embeddings)

| name | prediction |
|---|---|
| bf | softmax-weighted mean of the ``alpha`` most similar prompts, found by brute force |
| sps | the same of the prompts that Algorithm 1 finds in a tree of k-medoids |
| varpam | SPS with a tree of Partitioning Around Medoids |
| vared | SPS with a tree clustered by the Euclidean distance of activations |
| dop | mean activation of all historical prompts |
| fate | a linear softmax gate a layer on the prompt's embedding |
| ef | equal frequencies |
| category | mean activation of the prompt's task |
| ridge | ridge regression on the embeddings |

The last two are not the paper's. Fate's gates are the model's own in the paper and read the
embedding in place of the layers' inputs; recordings do not hold these weights, so here they are
fitted to the history, which favours Fate.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from servegym.envs.workloads.activations import Activations
from servegym.experiments.papers.serverless.predictors.base import (
    Array,
    Indexes,
    Predictor,
    js_divergence,
)
from servegym.experiments.papers.serverless.predictors.similar_prompts import (
    LARGE_DATA,
    BruteForce,
    SimilarPromptsSearch,
    VarED,
    VarPAM,
)
from servegym.experiments.papers.serverless.predictors.without_search import (
    CategoryMean,
    DistributionOnly,
    EqualFrequency,
    Fate,
    Ridge,
)

__all__ = ["LARGE_DATA", "PREDICTORS", "Predictor", "fitted", "js_divergence"]

PREDICTORS: dict[str, Callable[..., Predictor]] = {
    kind.name: kind
    for kind in (
        BruteForce,
        SimilarPromptsSearch,
        VarPAM,
        VarED,
        DistributionOnly,
        Fate,
        EqualFrequency,
        CategoryMean,
        Ridge,
    )
}
"""Predictors by name."""


def fitted(
    activations: Activations, embedding: str | None, name: str, **settings: Any
) -> Callable[[Indexes], Array]:
    """A predictor fitted to the train split: prompts ``(Q,)`` -> their shares ``(Q, L, K)``.

    Args:
        activations: The recordings.
        embedding: Key of their embeddings; None or one that they lack: zeros.
        name: One of `PREDICTORS`.
        settings: Arguments of its class.
    """
    train, shares, task = activations.rows("train"), activations.frequencies(), activations.task
    vectors = activations.embeddings.get(embedding or "", np.zeros((len(shares), 1)))
    predictor = PREDICTORS[name](**settings)
    predictor.fit(vectors[train], shares[train], tasks=task[train])
    return lambda prompts: predictor.predict(vectors[prompts], task=task[prompts])
