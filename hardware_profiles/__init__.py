"""Hardware profiles: latency laws and memory of devices, and fleets of them.

``load("rtx4090-llama-3.1-8b")`` gives a :class:`Profile`; ``load_fleet("edge-6-heterogeneous")``
a :class:`Fleet`. Importing this package loads numpy and nothing heavier.
"""

from servegym.hardware_profiles.fleet import Fleet, list_fleets, load_fleet
from servegym.hardware_profiles.law import Estimator, LawTables, Profile
from servegym.hardware_profiles.load import list_profiles, load
from servegym.hardware_profiles.moe import MoeLayer, list_moe_layers, load_moe

__all__ = [
    "Estimator",
    "Fleet",
    "LawTables",
    "MoeLayer",
    "Profile",
    "list_fleets",
    "list_moe_layers",
    "list_profiles",
    "load",
    "load_fleet",
    "load_moe",
]
