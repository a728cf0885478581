"""The simulator of the kernel as an object: a cluster, a list of requests and a placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from servegym._checks import choose, flag, real, whole
from servegym._jit import compile_kernels
from servegym.envs.expert_placement import kernel
from servegym.envs.expert_placement.cluster import Cluster

REPLICA_CHOICES = {
    "least_finish": kernel.LEAST_FINISH,
    "nearest": kernel.NEAREST,
    "random": kernel.RANDOM,
    "consolidate": kernel.CONSOLIDATE,
}
MIGRATION_SOURCES = {"host": kernel.HOST, "network": kernel.NETWORK}
SERVINGS = ("collaborative", "offload")
ROUTERS = {
    "home": kernel.HOME,
    "fewest_requests": kernel.FEWEST_REQUESTS,
    "least_load_per_gpu": kernel.LEAST_LOAD_PER_GPU,
    "affinity": kernel.AFFINITY,
}
EXECUTIONS = {"home": kernel.CALL, "forward": kernel.FORWARD}
CACHES = {"lru": kernel.LRU, "lfu": kernel.LFU, "activation_aware": kernel.ACTIVATION}


def make_plant(
    cluster: Cluster,
    replica_choice: str = "least_finish",
    replica_candidates: int = 8,
    migration_source: str = "host",
    serving: str = "collaborative",
    cache: str = "activation_aware",
    redirect: bool = False,
    router: str = "home",
    execution: str = "home",
) -> kernel.Plant:
    """The arrays of a cluster that the kernel reads.

    Args:
        cluster: the cluster.
        replica_choice: which copy a call goes to: ``least_finish`` (the least estimated return),
            ``nearest``, ``random``, or ``consolidate``: a copy on a server to which the layer sends
            a message anyhow, on the GPU that falls free first; without one ``least_finish``.
        replica_candidates: copies looked at.
        migration_source: weights of a new placement come from the ``host`` or over the ``network``.
            Over the network a source may drop an expert while it still sends it: the copy on its
            way counts as read.
        serving: ``collaborative`` (experts are called where they are) or ``offload`` (every server
            has all experts in host memory and fetches what its GPUs do not cache).
        cache: what a cache gives up first with ``offload``: the least recently used (``lru``), the
            least often used (``lfu``), or the one with fewest tokens, late layers first, with
            fetches ahead (``activation_aware``).
        redirect: the same as the router ``fewest_requests``.
        router: which server takes a request: its ``home``, the one that serves ``fewest_requests``
            or ``least_load_per_gpu`` (the request included), or by ``affinity`` the one with the
            largest share of the request's predicted experts, divided by that load.
        execution: where a layer runs: at ``home``, on the server that took the request, or
            ``forward``, on a server that holds it whole, see `kernel.forwarding.choose_path`.

    Raises:
        ValueError: an option is unknown, or two of them do not go together.
    """
    cfg = np.zeros(1, dtype=kernel.CONFIG)
    c = cfg[0]
    c["num_servers"], c["num_gpus"] = cluster.num_servers, cluster.num_gpus
    c["layers"], c["experts"], c["top_k"] = cluster.layers, cluster.experts, cluster.top_k
    c["link_model"] = kernel.PAIRWISE if cluster.link_model == "pairwise" else kernel.NIC
    c["messages"] = kernel.PER_SERVER if cluster.messages == "per_server" else kernel.PER_EXPERT
    c["choice"] = REPLICA_CHOICES[check_replica_choice(replica_choice, cluster.messages)]
    c["candidates"] = whole("replica_candidates", replica_candidates, 1)
    source = choose("migration_source", migration_source, MIGRATION_SOURCES)
    c["migration_source"] = MIGRATION_SOURCES[source]
    choose("serving", serving, SERVINGS)
    c["cache"] = CACHES[choose("cache", cache, CACHES)]
    c["router"] = ROUTERS[resolve_router(router, redirect)]
    c["execution"] = EXECUTIONS[check_execution(execution, serving)]
    c["message_cost"] = cluster.message_cost_s
    c["activation_bytes"] = cluster.activation_bytes
    c["stage_token"] = cluster.activation_bytes / cluster.pcie_bytes_s
    c["stage_base"] = cluster.pcie_latency_s
    c["expert_bytes"] = cluster.expert_bytes
    load = cluster.expert_bytes / cluster.weight_bytes_s
    given = cluster.fetch_overhead_s
    c["load"] = load if given is None else given + load
    c["fetch"] = (cluster.message_cost_s if given is None else given) + load
    c["read"] = cluster.expert_bytes / cluster.nvme_bytes_s
    c["host_limited"] = (cluster.host_slots < cluster.layers * cluster.experts).any()
    byte_s = 1.0 / cluster.link_bytes_s
    token_s = byte_s * cluster.activation_bytes
    n = cluster.num_servers
    pairs = np.stack([token_s, token_s.T, cluster.latency_s, cluster.latency_s.T], axis=2)
    unlike, route = np.unique(pairs.reshape(-1, 4), axis=0, return_inverse=True)
    return kernel.Plant(
        cfg=cfg,
        gpu=_records(
            kernel.PLANT_GPU,
            server=cluster.gpu_server,
            slots=cluster.slots,
            fixed=cluster.expert_base_s,
            token=cluster.expert_token_s,
        ),
        server=_records(
            kernel.PLANT_SERVER,
            first_gpu=cluster.home_gpu,
            end_gpu=np.cumsum(cluster.gpus),
            dense_base=cluster.dense_base_s,
            dense_token=cluster.dense_token_s,
            host_slots=cluster.host_slots,
        ),
        pair=_records(kernel.PAIR, byte_s=byte_s, latency=cluster.latency_s),
        hop=_records(
            kernel.HOP, out=unlike[:, 0], back=unlike[:, 1], there=unlike[:, 2], home=unlike[:, 3]
        ),
        route=np.ascontiguousarray(route.reshape(n, n), dtype=np.int32),
    )


def check_replica_choice(replica_choice: str, messages: str) -> str:
    """Return ``replica_choice`` if it is known and goes with ``messages``, else ValueError."""
    choose("replica_choice", replica_choice, REPLICA_CHOICES)
    if replica_choice == "consolidate" and messages != "per_server":
        raise ValueError(
            f"replica_choice='consolidate' needs messages='per_server', got {messages!r}: "
            "else no call shares a message."
        )
    return replica_choice


def resolve_router(router: str, redirect: bool) -> str:
    """The router that both arguments name.

    Raises:
        ValueError: one is bad, or ``redirect`` is given beside another router.
    """
    choose("router", router, ROUTERS)
    if not flag("redirect", redirect):
        return router
    if router not in ("home", "fewest_requests"):
        raise ValueError(
            f"redirect=True is the router 'fewest_requests'; router={router!r} is another one."
        )
    return "fewest_requests"


def check_execution(execution: str, serving: str) -> str:
    """Return ``execution`` if it is known and goes with ``serving``, else raise ValueError."""
    choose("execution", execution, EXECUTIONS)
    if execution == "forward" and serving == "offload":
        raise ValueError(
            "execution='forward' needs serving='collaborative': with 'offload' every server runs "
            "all layers."
        )
    return execution


def _records(dtype: np.dtype, **fields: Any) -> np.ndarray:
    """An array of records with these fields, of the shape of the first."""
    table = np.zeros(np.shape(next(iter(fields.values()))), dtype)
    for name, values in fields.items():
        table[name] = values
    return table


@dataclass(frozen=True, eq=False)
class Prompts:
    """Tokens of P prompts and the experts they go to.

    Attributes:
        tokens: int64 ``(P,)``.
        counts: int32 ``(P, L, E)`` tokens of the prompt at each expert.
        bank: uint64 ``(T, L)`` expert sets of single tokens, as bit masks.
        chosen: uint8 ``(T, L, k)`` the same sets as ascending lists.
        bank_start: int64 ``(P + 1,)``: prompt p has the rows from bank_start[p] to
            bank_start[p + 1], at least one.
    """

    tokens: np.ndarray
    counts: np.ndarray
    bank: np.ndarray
    chosen: np.ndarray
    bank_start: np.ndarray

    @cached_property
    def table(self) -> np.ndarray:
        """`kernel.PROMPT` ``(P,)``: tokens and rows of each prompt."""
        return _records(
            kernel.PROMPT, tokens=self.tokens, start=self.bank_start[:-1], end=self.bank_start[1:]
        )


def _integers(name: str, given: Any, kind: Any) -> np.ndarray:
    """``given`` as an array of whole numbers that ``kind`` can hold.

    Raises:
        ValueError: it is ragged, holds other things, or a number is out of range.
    """
    try:
        array = np.asarray(given)
    except ValueError:
        raise ValueError(f"{name} must be an array, its rows are of unlike length.") from None
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}; it must hold whole numbers.")
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        raise ValueError(
            f"{name} has numbers from {array.min()} to {array.max()}; they must lie between {low} "
            f"and {high}."
        )
    return np.ascontiguousarray(array, dtype=kind)


def make_prompts(
    tokens: Any, counts: Any, bank: Any, bank_start: Any, experts: int, top_k: int
) -> Prompts:
    """Check the arrays of prompts and list the experts of each token.

    Raises:
        ValueError: an array holds other than whole numbers, shapes do not fit, a prompt's counts
            are not k a token, it has no rows, or a set has not k experts.
    """
    whole("experts", experts, 1, 64)  # expert sets are masks of 64 bits
    whole("top_k", top_k, 1, experts)
    tokens = _integers("tokens", tokens, np.int64)
    counts = _integers("counts", counts, np.int32)
    bank = _integers("bank", bank, np.uint64)
    start = _integers("bank_start", bank_start, np.int64)
    if tokens.ndim != 1:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be (P,) numbers of at least 1.")
    if counts.ndim != 3 or counts.shape[0] != len(tokens) or counts.shape[2] != experts:
        raise ValueError(
            f"counts has shape {counts.shape}, {len(tokens)} prompts of {experts} experts need "
            f"({len(tokens)}, layers, {experts})."
        )
    if (tokens < 1).any():
        raise ValueError(f"tokens has {tokens.min()}; they must be (P,) numbers of at least 1.")
    wrong = np.argwhere((counts.sum(axis=2) != top_k * tokens[:, None]) | (counts < 0).any(axis=2))
    if len(wrong):
        p, layer = wrong[0].tolist()
        raise ValueError(
            f"counts[{p}, {layer}] must be at least 0 and sum to {top_k} x {tokens[p]} tokens, got "
            f"{counts[p, layer].sum()}."
        )
    if bank.ndim != 2 or bank.shape[1] != counts.shape[1] or start.shape != (len(tokens) + 1,):
        raise ValueError(f"bank {bank.shape} and bank_start {start.shape} do not fit the counts.")
    if start[0] != 0 or start[-1] != len(bank) or (np.diff(start) < 1).any():
        raise ValueError("bank_start must rise from 0 to the rows of the bank: a row per prompt.")
    chosen = np.zeros((*bank.shape, top_k), dtype=np.uint8)
    left = bank.copy()
    number = np.zeros(bank.shape, dtype=np.int64)
    for expert in range(experts):
        at = np.nonzero((left >> np.uint64(expert)) & np.uint64(1))
        if len(at[0]) and number[at].max() >= top_k:
            raise ValueError(f"a set of the bank has more than top_k={top_k} experts.")
        chosen[at[0], at[1], number[at]] = expert
        number[at] += 1
        left[at] &= ~(np.uint64(1) << np.uint64(expert))
    if left.any() or (number != top_k).any():
        raise ValueError(f"every set of the bank must have top_k={top_k} of {experts} experts.")
    return Prompts(tokens, counts, bank, chosen, start)


@dataclass(frozen=True, eq=False)
class Requests:
    """R requests in order of arrival.

    Attributes:
        home: int64 ``(R,)`` server that a request arrives at.
        arrival: ``(R,)`` seconds, non-decreasing.
        prompt: int64 ``(R,)`` its prompt.
        outputs: int64 ``(R,)`` tokens of the answer, at least 1.
        offset: int64 ``(R,)`` first row of the prompt that its decode steps use.
    """

    home: np.ndarray
    arrival: np.ndarray
    prompt: np.ndarray
    outputs: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a controller expects of a request, from other requests than those to come.

    Attributes:
        task: int64 ``(P,)`` task of a prompt, which the controller knows.
        profile: ``(K, L, E)`` share of each expert in the assignments of a task's requests.
        output_tokens: mean tokens of an answer.
    """

    task: np.ndarray
    profile: np.ndarray
    output_tokens: float


class Snapshot(NamedTuple):
    """A copied state of a simulator; no cache unless its GPUs are caches."""

    state: kernel.State
    cache: kernel.Cache | None


class Simulator:
    """One system from an empty start.

    ``forecast`` is what the router ``affinity`` and the execution ``forward`` go by; the other
    options are those of `make_plant`.

    Attributes:
        cluster: its cluster.
        plant: what the kernel reads of it.
        load: the requests of the episode.
        state: everything that changes.
        cache: what the GPUs' caches know, None unless ``serving`` is ``offload``.
    """

    def __init__(
        self,
        cluster: Cluster,
        prompts: Prompts,
        replica_choice: str = "least_finish",
        replica_candidates: int = 8,
        migration_source: str = "host",
        places: int = 0,
        forecast: Forecast | None = None,
        **serving: Any,
    ) -> None:
        if prompts.counts.shape[1:] != (cluster.layers, cluster.experts):
            raise ValueError(
                f"prompts of {prompts.counts.shape[1]} layers and {prompts.counts.shape[2]} "
                f"experts do not fit the model's {cluster.layers} and {cluster.experts}."
            )
        if prompts.chosen.shape[2] != cluster.top_k:
            raise ValueError(
                f"prompts of {prompts.chosen.shape[2]} experts a token do not fit the model's "
                f"top_k={cluster.top_k}."
            )
        if cluster.num_gpus > np.iinfo(np.int16).max:
            raise ValueError(f"{cluster.num_gpus} GPUs: the simulator numbers up to 32767.")
        self.cluster = cluster
        self.prompts = prompts
        self.plant = make_plant(
            cluster, replica_choice, replica_candidates, migration_source, **serving
        )
        self._set_forecast(forecast)
        self._caches = serving.get("serving") == "offload"
        self._forwards = serving.get("execution") == "forward"
        if self._caches and cluster.slots.min() < 1:
            raise ValueError("serving='offload' needs a slot on every GPU for the expert in use.")
        self._places = max(places, 4 * cluster.experts)
        self._scratch: kernel.Scratch | None = None
        if not self._caches:
            self._scratch = kernel.Scratch(
                _records(kernel.OPEN_MESSAGE, message=np.full(cluster.num_servers, -1)),
                np.zeros(cluster.experts, kernel.SPLIT),
            )
        self._set_up(np.zeros(0, kernel.REQUEST_GIVEN))
        none = np.zeros(0, np.int64)
        calls = [
            (kernel.run, self._arguments(np.inf)),
            (kernel.count_assignments, (none, none, none, self.load, self.counts())),
        ]
        if not self._caches:
            calls.append((kernel.start_migration, (self.plant, self.state)))
        compile_kernels("expert placement engine", calls)

    def _set_forecast(self, forecast: Forecast | None) -> None:
        """Keep the forecast as the kernel reads it.

        Raises:
            ValueError: it is missing where it is needed, or does not fit the prompts.
        """
        c = self.plant.cfg[0]
        layers, experts = self.cluster.layers, self.cluster.experts
        self._task = np.zeros(len(self.prompts.tokens), np.int64)
        self._profile = np.zeros((0, layers * experts))
        if forecast is None:
            for name, option in (("router", kernel.AFFINITY), ("execution", kernel.FORWARD)):
                if c[name] == option:
                    raise ValueError(f"this {name} needs a forecast, got forecast=None.")
            return
        task = _integers("forecast.task", forecast.task, np.int64)
        profile = np.asarray(forecast.profile, dtype=np.float64)
        if profile.ndim != 3 or profile.shape[1:] != (layers, experts):
            raise ValueError(
                f"forecast.profile has shape {profile.shape}; it must be (tasks, {layers}, "
                f"{experts})."
            )
        if task.shape != self._task.shape or not ((task >= 0) & (task < len(profile))).all():
            raise ValueError(
                f"forecast.task must be {len(self._task)} numbers from 0 to {len(profile) - 1}."
            )
        self._task, self._profile = task, profile.reshape(len(profile), -1)
        c["decode_steps"] = real("forecast.output_tokens", forecast.output_tokens, 1.0) - 1.0

    def begin(self, requests: Requests, placement: np.ndarray) -> None:
        """Start at time 0 with ``requests`` to come and a feasible ``placement`` in place.

        Caches may start with any experts within the slots; what no GPU holds is in host memory.
        """
        if len(requests.arrival) > kernel.MAX_INDEX:
            raise ValueError(f"an episode may have {kernel.MAX_INDEX} requests at most.")
        self._set_up(_records(kernel.REQUEST_GIVEN, **vars(requests)))
        self._place(self.cluster.check_placement(placement, covered=not self._caches))

    def _set_up(self, requests: np.ndarray) -> None:
        """An empty system at time 0 with requests, `kernel.REQUEST_GIVEN` ``(R,)``, to come."""
        p = self.prompts
        self.load = kernel.Load(
            requests, p.table, p.counts, p.bank, p.chosen, self._task, self._profile
        )
        self.state = self._new_state(len(requests))
        self.cache = self._new_cache()

    def _new_state(self, requests: int) -> kernel.State:
        """An empty system at time 0."""
        cluster, places = self.cluster, self._places
        n, gpus, total = cluster.num_servers, cluster.num_gpus, cluster.layers * cluster.experts
        # Not a power of two: rows that far apart would share a few lines of the cache.
        calls = cluster.experts + 8 if cluster.messages == "per_server" else 1
        state = kernel.State(
            meta=np.zeros(1, kernel.META),
            event_time=np.zeros(places + requests + gpus + 8, np.int64),
            event_key=np.zeros(places + requests + gpus + 8, np.int64),
            request=np.zeros(requests, kernel.REQUEST),
            gpu=np.zeros(gpus, kernel.GPU),
            link=np.zeros(n * n, kernel.LINK),
            message=np.zeros(places, kernel.MESSAGE),
            call=np.zeros((places, calls, 2), np.int32),
            free=np.arange(places - 1, -1, -1, dtype=np.int32),
            resident=np.zeros((gpus, total), np.uint8),
            held=np.zeros((cluster.layers, gpus), np.uint64),
            target=np.zeros((gpus, total), np.uint8),
            holders=np.zeros((total, gpus), np.int16),
            copies=np.zeros(total, np.int64),
            server=np.zeros(n, kernel.SERVER),
            counts=np.zeros((n, total), np.int64),
            path=np.zeros((requests if self._forwards else 0, cluster.layers), np.int16),
            host=np.zeros(
                (n if self.plant.cfg["host_limited"][0] else 0, total), kernel.HOST_EXPERT
            ),
        )
        for held, number in zip(state.host, cluster.host_slots, strict=False):
            held["ready"] = np.where(np.arange(total) < number, 0.0, -1.0)
        state.meta["free"] = places
        state.meta["fewest_copies"] = gpus
        state.request["first"] = state.request["finish"] = np.nan
        state.request["home"] = -1
        state.gpu["loading"] = state.gpu["source"] = -1
        state.gpu["next_load"] = total
        return state

    def _new_cache(self) -> kernel.Cache | None:
        if not self._caches:
            return None
        shape = self.cluster.num_gpus, self.cluster.layers * self.cluster.experts
        return kernel.Cache(np.zeros(shape), np.zeros(shape, kernel.CACHED_EXPERT))

    def _place(self, z: np.ndarray) -> None:
        """Put a feasible placement in place without time or resources."""
        state = self.state
        state.target[:] = state.resident[:] = z.reshape(self.cluster.num_gpus, -1)
        bits = np.uint64(1) << np.arange(self.cluster.experts, dtype=np.uint64)
        state.held[:] = (z * bits).sum(axis=2, dtype=np.uint64).T
        state.gpu["used"] = state.target.sum(axis=1, dtype=np.int64)
        state.gpu["peak"] = np.maximum(state.gpu["peak"], state.gpu["used"])
        state.copies[:] = state.target.sum(axis=0, dtype=np.int64)
        expert, gpu = np.nonzero(state.target.T)
        first = np.cumsum(state.copies) - state.copies
        state.holders[expert, np.arange(len(expert)) - first[expert]] = gpu

    def run(self, until: float = np.inf) -> None:
        """Advance to the time ``until``; by default until every request is served."""
        while kernel.run(*self._arguments(float(until))) == kernel.POOL_FULL:
            self._grow()

    def _arguments(self, until: float) -> tuple[Any, ...]:
        return self.plant, self.load, self.state, self._scratch, self.cache, until

    def _grow(self) -> None:
        old = self.state
        count = self._places
        self._places = 2 * count
        if self._places > kernel.MAX_INDEX:
            raise RuntimeError(f"more than {count} messages are under way: the load is too high.")
        new = self._new_state(len(old.request))
        free = int(old.meta["free"][0])
        for name in kernel.State._fields:
            mine, theirs = getattr(new, name), getattr(old, name)
            mine[tuple(slice(0, s) for s in theirs.shape)] = theirs
        new.free[:count] = np.arange(2 * count - 1, count - 1, -1)
        new.free[count : count + free] = old.free[:free]
        new.meta["free"] = count + free
        self.state = new

    def adopt(self, placement: np.ndarray, at_once: bool = False) -> None:
        """Begin to move to a feasible ``placement`` (uint8 ``(G, L, E)``).

        ``at_once`` puts it in place without time, before anything has happened.

        Raises:
            ValueError: it is not feasible, it is too late for ``at_once``, or GPUs are caches.
        """
        if self._caches:
            raise ValueError("serving='offload': caches fill themselves, no placement is adopted.")
        if at_once and self.state.meta["sequence"][0] > 0:
            raise ValueError("at_once=True needs a system in which nothing has happened yet.")
        z, state = self.cluster.check_placement(placement), self.state
        state.counts[:] = 0
        for name in ("local_s", "local_tokens", "remote_s", "remote_tokens"):
            state.server[name] = 0.0
        if at_once:
            self._place(z)
        else:
            state.target[:] = z.reshape(self.cluster.num_gpus, -1)
            kernel.start_migration(self.plant, state)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return float(self.state.meta["now"][0])

    def latencies(self) -> np.ndarray:
        """``(R,)`` seconds from arrival to the last token, NaN for requests not served yet."""
        return self.state.request["finish"] - self.load.request["arrival"]

    def placement(self) -> np.ndarray:
        """Uint8 ``(G, L, E)``: experts that serve now."""
        return self._shaped(self.state.resident)

    def target(self) -> np.ndarray:
        """Uint8 ``(G, L, E)``: the placement adopted last."""
        return self._shaped(self.state.target)

    def counts(self) -> np.ndarray:
        """Int64 ``(N, L, E)``: assignments since the last adopted change."""
        cluster = self.cluster
        return self.state.counts.reshape(
            cluster.num_servers, cluster.layers, cluster.experts
        ).copy()

    def count_assignments(
        self, home: np.ndarray, prompt: np.ndarray, outputs: np.ndarray
    ) -> np.ndarray:
        """Int64 ``(N, L, E)``: assignments of requests that are not simulated.

        Args:
            home: int64 ``(R,)`` server of each.
            prompt: int64 ``(R,)`` its prompt.
            outputs: int64 ``(R,)`` tokens of its answer.
        """
        counts = np.zeros_like(self.counts())
        kernel.count_assignments(home, prompt, outputs, self.load, counts)
        return counts

    def _shaped(self, z: np.ndarray) -> np.ndarray:
        return z.reshape(len(z), self.cluster.layers, self.cluster.experts).copy()

    def clone(self) -> Snapshot:
        """A copy of the state."""
        return Snapshot(_copied(self.state), _copied(self.cache))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a copied state of the same requests."""
        self.state, self.cache = _copied(snapshot.state), _copied(snapshot.cache)
        self._places = len(snapshot.state.free)


def _copied(tables: Any) -> Any:
    return tables if tables is None else type(tables)(*(table.copy() for table in tables))


def uniform_placement(cluster: Cluster) -> np.ndarray:
    """Uint8 ``(G, L, E)``: every expert once, dealt to GPUs in proportion to their slots."""
    total = cluster.layers * cluster.experts
    z = np.zeros((cluster.num_gpus, total), dtype=np.uint8)
    room = cluster.slots.astype(np.float64)
    used = np.zeros(cluster.num_gpus)
    for i in range(total):
        g = int(np.argmin((used + 1.0) / np.maximum(room, 1e-9)))
        z[g, i] = 1
        used[g] += 1
    return z.reshape(-1, cluster.layers, cluster.experts)
