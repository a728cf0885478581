"""Which server takes a request, and requests, hidden states and answers on their way to another."""

from __future__ import annotations

from servegym._jit import jit
from servegym.envs.expert_placement.kernel import events
from servegym.envs.expert_placement.kernel.calls import link_of
from servegym.envs.expert_placement.kernel.tables import AFFINITY, FEWEST_REQUESTS

# A request, its answer and a token on its way to the first layer travel as token numbers.
TOKEN_BYTES = 4.0


@jit
def route(c, plant, load, st, r, now):
    """Send a request to the server that the router chooses.

    Of servers of equal value its own goes first, then the nearest.

    Returns:
        The request if it stays, else -1.
    """
    n = load.request[r].home
    best = n
    least = _value(c, plant, load, st, r, n)
    for m in range(c.num_servers):
        if m == n:
            continue
        value = _value(c, plant, load, st, r, m)
        # Its own server wins ties: sending a request on costs time.
        nearer = best != n and plant.pair[n, m].latency < plant.pair[n, best].latency
        if value < least or (value == least and nearer):
            least = value
            best = m
    st.request[r].home = best
    st.request[r].taken = best
    if best == n:
        return r
    travel(c, plant, st, r, n, best, TOKEN_BYTES * st.request[r].tokens, 0.0, now)
    return -1


@jit
def _value(c, plant, load, st, r, m):
    """What the router would rather not have, of a server."""
    serving = float(st.server[m].serving)
    if c.router == FEWEST_REQUESTS:
        return serving
    load_per_gpu = (serving + 1.0) / (plant.server[m].end_gpu - plant.server[m].first_gpu)
    if c.router == AFFINITY:
        return -predicted_share(plant, load, st, r, m) / load_per_gpu
    return load_per_gpu


@jit
def predicted_share(plant, load, st, r, m):
    """Share of a request's predicted assignments whose experts a server's GPUs hold now."""
    profile = load.profile[load.task[load.request[r].prompt]]
    share = 0.0
    for i in range(profile.shape[0]):
        for g in range(plant.server[m].first_gpu, plant.server[m].end_gpu):
            if st.resident[g, i]:
                share += profile[i]
                break
    return share


@jit
def send_answer(c, plant, load, st, r, now):
    """Send the answer of a request that ends elsewhere to where the request arrived."""
    request = load.request[r]
    n = st.request[r].home
    travel(c, plant, st, r, n, request.home, TOKEN_BYTES * request.outputs, 0.0, now)


@jit
def travel(c, plant, st, r, n, to, size, staging, now):
    """Send ``size`` bytes of a request, there after the latency and ``staging`` seconds more."""
    m = st.meta[0]
    link = st.link[link_of(c, n, to)]
    sent = max(now, link.free) + (size * plant.pair[n, to].byte_s + c.message_cost)
    link.free = sent
    m.network_bytes += size
    m.messages += 1
    there = sent + plant.pair[n, to].latency + staging
    events.add_event(st, there, events.TRAVEL_END, r)
