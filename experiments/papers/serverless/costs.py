"""What a request costs: Remoe, its rivals and the optimum (Fig. 9, 10).

``python -m servegym.experiments.papers.serverless.costs`` makes both figures, ``--figure fig9``
one. The setting is the paper's (preset ``seed``): 115 prompt and 200 output tokens, every request
cold, no cold start billed, one overhead t_rem for all layers. Remoe plans from *predicted*
activations; all plans are judged on the recorded tokens of held-out prompts. The optimum, which the
paper does not show, knows them (`servegym.baselines.serverless_moe.grid_optimum`). Everything is
planned and billed by three bills: the paper's, which has neither fees nor rounding, and those of
AWS Lambda and Alibaba Function Compute; and with GPUs whose times are chosen (``eager``,
``fused``) or derived from the project's laws of measured layers.

The optimum is over 17 remote ratios, as in the environments.

* ``fig9``: all deployments.
* ``fig10``: prompt and output tokens in other proportions, on the readings of the paper's testbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from servegym._command_line import run_main
from servegym.experiments.papers.plotting import Bars, Lines
from servegym.experiments.papers.serverless.billing import BILLS, MODELS, N_IN, N_OUT, SYNTHETIC
from servegym.experiments.papers.serverless.claims import CLAIMS, TESTBED
from servegym.experiments.papers.serverless.methods import KEY, Setting, serve
from servegym.experiments.papers.study import Options, Study, command, ends
from servegym.experiments.papers.verdicts import found_for
from servegym.hardware_profiles.serverless import GPUS

TOKENS = N_IN + N_OUT
PROMPT_TOKENS = tuple(round(TOKENS * share) for share in (0.8, 2 / 3, 0.5, 1 / 3, 0.2))


def _settings(
    options: Options, gpus: Sequence[str], prompt_tokens: Sequence[int]
) -> list[dict[str, Any]]:
    models = ends(options, (*MODELS, SYNTHETIC))
    return [
        asdict(Setting(model, gpu, bill, n_in=n_in, n_out=TOKENS - n_in))
        for model, bill, gpu, n_in in product(
            models, ends(options, tuple(BILLS)), gpus, prompt_tokens
        )
    ]


STUDIES = (
    Study(
        "fig09_cost",
        "fig9",
        serve,
        lambda options: _settings(options, ends(options, GPUS), (N_IN,)),
        notes=found_for(
            CLAIMS,
            "fig09_cost",
            "The paper (Fig. 9) has Remoe cheapest on both models, 'up to 57.14 %' cheaper on "
            "deepseek-v2-lite; on gpt2-moe differences are minor and Fetch is sometimes cheaper",
            "Algorithm 2 as printed takes the largest b that meets the limits however dear its "
            "calls, and keeps W at the largest remote specification (its line 8) even with no "
            "expert local; where per_expert is below the optimum, it is because the calls of a "
            "token run side by side there and one after another in Eq. 5",
        ),
        picture=Bars(
            x="method", y="over_mix", line="gpu", panels=("model", "bill"), log="y", level=1.0
        ),
        key=KEY,
    ),
    Study(
        "fig10_ratio",
        "fig10",
        serve,
        lambda options: _settings(options, tuple(TESTBED), ends(options, PROMPT_TOKENS)),
        notes=found_for(
            CLAIMS,
            "fig10_ratio",
            "The paper (Fig. 10) has Remoe stable over all proportions; on gpt2-moe CPU becomes "
            "dearer than the others as decoding grows, on deepseek-v2-lite GPU is far dearer "
            "throughout",
        ),
        picture=Lines(x="n_out", y="usd_per_1000", line="method", panels=("model", "gpu", "bill")),
        key=KEY,
    ),
)

main = command(__spec__.name, __doc__, STUDIES, episodes=50)

if __name__ == "__main__":
    run_main(main)
