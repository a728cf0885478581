"""Workloads of the environments: requests, predictions, arrivals, traces, expert activations.

``load_catalog`` gives prompts with the scores and output lengths of several LLMs, ``predict`` what
a router predicts of them, ``make_arrivals`` an arrival process, ``load_trace`` a recorded one,
``load_activations`` and ``load_model`` the experts that the tokens of a MoE model take.
"""

from servegym._files import MalformedFileError
from servegym.envs.workloads.activations import load_activations, load_model
from servegym.envs.workloads.arrivals import list_arrivals, make_arrivals
from servegym.envs.workloads.catalog import Catalog
from servegym.envs.workloads.catalog_names import list_catalogs, load_catalog
from servegym.envs.workloads.predictions import bucket_edges, predict
from servegym.envs.workloads.traces import load_trace

__all__ = [
    "Catalog",
    "MalformedFileError",
    "bucket_edges",
    "list_arrivals",
    "list_catalogs",
    "load_activations",
    "load_catalog",
    "load_model",
    "load_trace",
    "make_arrivals",
    "predict",
]
