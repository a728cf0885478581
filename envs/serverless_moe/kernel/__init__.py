"""Jitted engine of the serverless MoE family: one whole request per call and system.

``layout`` describes the arrays: those of a problem are in one named tuple (``Tables``), those of a
batch of B systems in another (``Batch``). ``planning`` reads an action, ``routing`` counts the
tokens of experts, ``service`` serves the request and ``observation`` writes what is seen of the
next one. Units are seconds, MB, tokens and USD.
"""

from __future__ import annotations

from servegym._jit import borrowed, jit
from servegym.envs.serverless_moe.kernel.observation import observe_row
from servegym.envs.serverless_moe.kernel.planning import functions_are_warm
from servegym.envs.serverless_moe.kernel.service import serve


@jit
def observe(t, b, which):
    """Write observations and action masks of the rows with ``which`` (int8 ``(B,)``) set."""
    t, b = borrowed(t), borrowed(b)
    for row in range(len(which)):
        if which[row] != 0:
            observe_row(t, b, row)


@jit
def step(t, b, actions, nvec, which):
    """Serve the current request of the rows with ``which`` set, by ``actions`` int64 ``(B, n)``.

    Returns how many episodes ended; -1 - i if the action of system i is out of range, which is from
    0 to below ``nvec`` ``(n,)``, and then nothing has changed.
    """
    t, b = borrowed(t), borrowed(b)
    for row in range(len(which)):
        # Before anything moves: an error leaves all systems as they were.
        if which[row] != 0:
            for i in range(len(nvec)):
                if actions[row, i] < 0 or actions[row, i] >= nvec[i]:
                    return -1 - row
    ended = 0
    for row in range(len(which)):
        if which[row] != 0:
            action = actions[row]
            if t.cfg[0].keep_action == 1 and action[-1] == 1:
                if functions_are_warm(t.cfg[0], b.env[row]):
                    action = b.action[row]
            if serve(t, b, row, action):
                ended += 1
            observe_row(t, b, row)
    return ended
