"""Workloads of the environments: requests, predictions, arrivals, traces, expert activations.

``load_catalog`` gives prompts with the scores and output lengths of several LLMs, ``predict`` what
a router predicts of them, ``make_arrivals`` an arrival process, ``load_trace`` a recorded one and
``load_prefix_trace`` recorded requests with the prefixes they share.
"""

from servegym._files import MalformedFileError
from servegym.envs.workloads.activations import (
    Activations,
    MoeModel,
    list_models,
    load_activations,
    load_model,
    make_toy_activations,
)
from servegym.envs.workloads.arrivals import Arrivals, list_arrivals, make_arrivals
from servegym.envs.workloads.catalog import Catalog
from servegym.envs.workloads.catalog_names import list_catalogs, load_catalog
from servegym.envs.workloads.predictions import bucket_edges, predict
from servegym.envs.workloads.prefix_traces import PrefixTrace, list_prefix_traces, load_prefix_trace
from servegym.envs.workloads.traces import Trace, load_trace

__all__ = [
    "Activations",
    "Arrivals",
    "Catalog",
    "MalformedFileError",
    "MoeModel",
    "PrefixTrace",
    "Trace",
    "bucket_edges",
    "list_arrivals",
    "list_catalogs",
    "list_models",
    "list_prefix_traces",
    "load_activations",
    "load_catalog",
    "load_model",
    "load_prefix_trace",
    "load_trace",
    "make_arrivals",
    "make_toy_activations",
    "predict",
]
