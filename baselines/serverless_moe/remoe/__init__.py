"""Remoe, the paper's controller: a predicted request in, a plan out.

| module | part of the paper |
|---|---|
| bounds | Theorems 1 and 4 and Corollary 1, corrected |
| mmp | Algorithm 2: the remote ratio b and the main function's memory from worst cases |
| memory | P2 and its dual: memory of the remote functions (Sec. IV-E) |
| replicas | replicas of the remote functions by Eq. 15 |
| controller | all of them in turn (Fig. 2) |
| policies | the controller as a policy of the environment |
"""

from servegym.baselines.serverless_moe.remoe.controller import READINGS, Decision, remoe

__all__ = ["READINGS", "Decision", "remoe"]
