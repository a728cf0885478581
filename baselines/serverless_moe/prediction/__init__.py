"""Prediction of expert activations from a prompt's embedding (Sec. IV-B, V-B).

Every predictor is fitted on historical prompts and returns, for new ones, the share of the calls
of a layer that each expert gets: ``(Q, L, K)``, each layer summing to 1. Use::

    predictor = make_predictor("sps", alpha=5, beta=60)
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

from servegym.baselines.serverless_moe.prediction.base import Predictor, js_divergence
from servegym.baselines.serverless_moe.prediction.predictors import PREDICTORS, make_predictor
from servegym.baselines.serverless_moe.prediction.similar_prompts import LARGE_DATA

__all__ = ["LARGE_DATA", "PREDICTORS", "Predictor", "js_divergence", "make_predictor"]
