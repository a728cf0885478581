"""The simulator of the kernel as an object: a cluster, a list of requests and a placement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from servegym._jit import compile_kernels
from servegym.envs import _arguments as arg
from servegym.envs._arguments import Arguments
from servegym.envs.expert_placement.cluster import Cluster
from servegym.envs.expert_placement.kernel import migration, simulation, tables
from servegym.envs.workloads.expert_sets import masks_to_ids

REPLICA_CHOICES = {
    "least_finish": tables.LEAST_FINISH,
    "nearest": tables.NEAREST,
    "random": tables.RANDOM,
    "consolidate": tables.CONSOLIDATE,
}
MIGRATION_SOURCES = {"host": tables.HOST, "network": tables.NETWORK}
SERVINGS = ("collaborative", "offload")
ROUTERS = {
    "home": tables.HOME,
    "fewest_requests": tables.FEWEST_REQUESTS,
    "least_load_per_gpu": tables.LEAST_LOAD_PER_GPU,
    "affinity": tables.AFFINITY,
}
EXECUTIONS = {"home": tables.CALL, "forward": tables.FORWARD}
CACHES = {"lru": tables.LRU, "lfu": tables.LFU, "activation_aware": tables.ACTIVATION}


@dataclass(frozen=True, kw_only=True)
class SimulatorArguments(Arguments):
    """The options of a simulator.

    - ``replica_choice``: the copy that a call goes to: ``least_finish`` has the least estimated
      return; ``consolidate`` is on a server to which the layer sends a message anyhow, on the GPU
      that falls free first, and without one ``least_finish``.
    - ``migration_source``: over the network a source may drop an expert while it still sends it:
      the copy on its way counts as read.
    - ``serving``: ``collaborative`` (experts are called where they are) or ``offload`` (every
      server has all experts in host memory and fetches what its GPUs do not cache).
    - ``cache``: what goes first: the least recently used (``lru``), the least often used (``lfu``),
      or the one with fewest tokens, late layers first, with fetches ahead (``activation_aware``).
    - ``router``: the server that takes a request: its ``home``, the one that serves
      ``fewest_requests`` or ``least_load_per_gpu`` (the request included), or by ``affinity`` the
      one with the largest share of the request's predicted experts, divided by that load.
    - ``execution``: where a layer runs: on that server, or ``forward``, on a server that holds it
      whole, see `kernel.forwarding.choose_path`.
    """

    replica_choice: str = arg.choice("least_finish", REPLICA_CHOICES, "the remote copy")
    replica_candidates: int = arg.whole(8, 1, "copies looked at")
    migration_source: str = arg.choice("host", MIGRATION_SOURCES, "where new weights come from")
    serving: str = arg.choice(
        "collaborative", SERVINGS, "`offload`: GPUs are caches (as [2]), plans do nothing"
    )
    cache: str = arg.choice("activation_aware", CACHES, "what a cache gives up first")
    router: str = arg.choice("home", ROUTERS, "which server takes a request")
    execution: str = arg.choice("home", EXECUTIONS, "where layers run")


def check_options(options: SimulatorArguments, messages: str) -> None:
    """Check that options go together, and with the messages of the cluster.

    Raises:
        ValueError: two of them do not.
    """
    if options.replica_choice == "consolidate" and messages != "per_server":
        raise ValueError(
            f"replica_choice='consolidate' needs messages='per_server', got {messages!r}: "
            "else no call shares a message."
        )
    if options.execution == "forward" and options.serving == "offload":
        raise ValueError(
            "execution='forward' needs serving='collaborative': with 'offload' every server runs "
            "all layers."
        )


def make_plant(cluster: Cluster, options: SimulatorArguments) -> tables.Plant:
    """The arrays of a cluster that the kernel reads."""
    check_options(options, cluster.messages)
    cfg = np.zeros(1, dtype=tables.CONFIG)
    c = cfg[0]
    c["num_servers"], c["num_gpus"] = cluster.num_servers, cluster.num_gpus
    c["layers"], c["experts"], c["top_k"] = cluster.layers, cluster.experts, cluster.top_k
    c["link_model"] = tables.PAIRWISE if cluster.link_model == "pairwise" else tables.NIC
    c["messages"] = tables.PER_SERVER if cluster.messages == "per_server" else tables.PER_EXPERT
    c["choice"] = REPLICA_CHOICES[options.replica_choice]
    c["candidates"] = options.replica_candidates
    c["migration_source"] = MIGRATION_SOURCES[options.migration_source]
    c["cache"], c["router"] = CACHES[options.cache], ROUTERS[options.router]
    c["execution"] = EXECUTIONS[options.execution]
    c["message_cost"] = cluster.message_cost_s
    c["activation_bytes"] = cluster.activation_bytes
    c["stage_token"] = cluster.activation_bytes / cluster.pcie_bytes_s
    c["stage_base"] = cluster.pcie_latency_s
    c["expert_bytes"] = cluster.expert_bytes
    c["load"] = cluster.expert_bytes / cluster.pcie_bytes_s
    c["fetch"] = cluster.message_cost_s + c["load"]
    byte_s = 1.0 / cluster.link_bytes_s
    token_s = byte_s * cluster.activation_bytes
    n = cluster.num_servers
    pairs = np.stack([token_s, token_s.T, cluster.latency_s, cluster.latency_s.T], axis=2)
    unlike, route = np.unique(pairs.reshape(-1, 4), axis=0, return_inverse=True)
    return tables.Plant(
        cfg=cfg,
        gpu=_records(
            tables.PLANT_GPU,
            server=cluster.gpu_server,
            slots=cluster.slots,
            fixed=cluster.expert_base_s,
            token=cluster.expert_token_s,
        ),
        server=_records(
            tables.PLANT_SERVER,
            first_gpu=cluster.home_gpu,
            end_gpu=np.cumsum(cluster.gpus),
            dense_base=cluster.dense_base_s,
            dense_token=cluster.dense_token_s,
        ),
        pair=_records(tables.PAIR, byte_s=byte_s, latency=cluster.latency_s),
        hop=_records(
            tables.HOP, out=unlike[:, 0], back=unlike[:, 1], there=unlike[:, 2], home=unlike[:, 3]
        ),
        route=np.ascontiguousarray(route.reshape(n, n), dtype=np.int32),
    )


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
        """`PROMPT` ``(P,)``: tokens and rows of each prompt."""
        return _records(
            tables.PROMPT, tokens=self.tokens, start=self.bank_start[:-1], end=self.bank_start[1:]
        )


def make_prompts(tokens: Any, counts: Any, bank: Any, bank_start: Any, top_k: int) -> Prompts:
    """Arrays of prompts as `Activations` has checked them, with the experts of each token listed.

    Copies, since numba has another type for arrays that are read-only until they are pickled.
    """
    return Prompts(
        tokens=np.array(tokens, np.int64),
        counts=np.array(counts, np.int32),
        bank=np.array(bank, np.uint64),
        chosen=masks_to_ids(np.asarray(bank, np.uint64), top_k),
        bank_start=np.array(bank_start, np.int64),
    )


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

    state: tables.State
    cache: tables.Cache | None


class Simulator:
    """One system from an empty start.

    ``forecast`` is what the router ``affinity`` and the execution ``forward`` go by; the other
    options are `SimulatorArguments`.

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
        *,
        forecast: Forecast | None = None,
        **options: Any,
    ) -> None:
        sizes = cluster.layers, cluster.experts, cluster.top_k
        shape = (*prompts.counts.shape[1:], prompts.chosen.shape[2])
        if shape != sizes:
            raise ValueError(
                f"prompts of (layers, experts, top_k)={shape} do not fit the model's {sizes}."
            )
        if cluster.num_gpus > np.iinfo(np.int16).max:
            raise ValueError(f"{cluster.num_gpus} GPUs: the simulator numbers up to 32767.")
        self.cluster = cluster
        self.prompts = prompts
        chosen = SimulatorArguments.fill(options)
        self.plant = make_plant(cluster, chosen)
        self._task = np.zeros(len(prompts.tokens), np.int64)
        self._profile = np.zeros((0, cluster.layers * cluster.experts))
        c = self.plant.cfg[0]
        asked = c["router"] == tables.AFFINITY or c["execution"] == tables.FORWARD
        if asked and forecast is None:  # the kernel would read beyond its arrays
            raise ValueError("router='affinity' and execution='forward' need a forecast")
        if forecast is not None:
            self._task = forecast.task
            self._profile = forecast.profile.reshape(len(forecast.profile), -1)
            c["decode_steps"] = forecast.output_tokens - 1.0
        self._caches = chosen.serving == "offload"
        self._forwards = chosen.execution == "forward"
        if self._caches and cluster.slots.min() < 1:
            raise ValueError("serving='offload' needs a slot on every GPU for the expert in use.")
        self._places = 4 * cluster.experts  # for messages under way; it grows
        self._scratch: tables.Scratch | None = None
        if not self._caches:
            self._scratch = tables.Scratch(
                _records(tables.OPEN_MESSAGE, message=np.full(cluster.num_servers, -1)),
                np.zeros(cluster.experts, tables.SPLIT),
            )
        self._set_up(np.zeros(0, tables.REQUEST_GIVEN))
        none = np.zeros(0, np.int64)
        calls = [
            (simulation.run, self._arguments(np.inf)),
            (simulation.count_assignments, (none, none, none, self.load, self.counts())),
        ]
        if not self._caches:
            calls.append((migration.start_migration, (self.plant, self.state)))
        compile_kernels("expert placement engine", calls)

    def begin(self, requests: Requests, placement: np.ndarray) -> None:
        """Start at time 0 with ``requests`` to come and a feasible ``placement`` in place.

        Caches may start with any experts within the slots; what no GPU holds is in host memory.
        """
        if len(requests.arrival) > tables.MAX_INDEX:
            raise ValueError(f"an episode may have {tables.MAX_INDEX} requests at most.")
        self._set_up(_records(tables.REQUEST_GIVEN, **vars(requests)))
        self._place(self.cluster.check_placement(placement, covered=not self._caches))

    def _set_up(self, requests: np.ndarray) -> None:
        """An empty system at time 0 with requests, `REQUEST_GIVEN` ``(R,)``, to come."""
        p = self.prompts
        self.load = tables.Load(
            requests, p.table, p.counts, p.bank, p.chosen, self._task, self._profile
        )
        self.state = self._new_state(len(requests))
        self.cache = self._new_cache()

    def _new_state(self, requests: int) -> tables.State:
        """An empty system at time 0."""
        cluster, places = self.cluster, self._places
        n, gpus, total = cluster.num_servers, cluster.num_gpus, cluster.layers * cluster.experts
        # Not a power of two: rows that far apart would share a few lines of the cache.
        calls = cluster.experts + 8 if cluster.messages == "per_server" else 1
        state = tables.State(
            meta=np.zeros(1, tables.META),
            event_time=np.zeros(places + requests + gpus + 8, np.int64),
            event_key=np.zeros(places + requests + gpus + 8, np.int64),
            request=np.zeros(requests, tables.REQUEST),
            gpu=np.zeros(gpus, tables.GPU),
            link=np.zeros(n * n, tables.LINK),
            message=np.zeros(places, tables.MESSAGE),
            call=np.zeros((places, calls, 2), np.int32),
            free=np.arange(places - 1, -1, -1, dtype=np.int32),
            resident=np.zeros((gpus, total), np.uint8),
            held=np.zeros((cluster.layers, gpus), np.uint64),
            target=np.zeros((gpus, total), np.uint8),
            holders=np.zeros((total, gpus), np.int16),
            copies=np.zeros(total, np.int64),
            server=np.zeros(n, tables.SERVER),
            counts=np.zeros((n, total), np.int64),
            path=np.zeros((requests if self._forwards else 0, cluster.layers), np.int16),
        )
        state.meta["free"] = places
        state.meta["fewest_copies"] = gpus
        state.request["first"] = state.request["finish"] = np.nan
        state.request["home"] = -1
        state.gpu["loading"] = state.gpu["source"] = -1
        state.gpu["next_load"] = total
        return state

    def _new_cache(self) -> tables.Cache | None:
        if not self._caches:
            return None
        shape = self.cluster.num_gpus, self.cluster.layers * self.cluster.experts
        return tables.Cache(np.zeros(shape), np.zeros(shape, tables.CACHED_EXPERT))

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
        while simulation.run(*self._arguments(float(until))) == tables.POOL_FULL:
            self._grow()

    def _arguments(self, until: float) -> tuple[Any, ...]:
        return self.plant, self.load, self.state, self._scratch, self.cache, until

    def _grow(self) -> None:
        old = self.state
        count = self._places
        self._places = 2 * count
        if self._places > tables.MAX_INDEX:
            raise RuntimeError(f"more than {count} messages are under way: the load is too high.")
        new = self._new_state(len(old.request))
        free = int(old.meta["free"][0])
        for name in tables.State._fields:
            larger, array = getattr(new, name), getattr(old, name)
            larger[tuple(slice(0, s) for s in array.shape)] = array
        new.free[:count] = np.arange(2 * count - 1, count - 1, -1)
        new.free[count : count + free] = old.free[:free]
        new.meta["free"] = count + free
        self.state = new

    def adopt(self, placement: np.ndarray, at_once: bool = False) -> None:
        """Begin to move to a feasible ``placement`` (uint8 ``(G, L, E)``).

        ``at_once`` puts it in place without time, before anything has happened. Caches fill
        themselves and adopt none.

        Raises:
            ValueError: it is not feasible.
        """
        z, state = self.cluster.check_placement(placement), self.state
        state.counts[:] = 0
        for name in ("local_s", "local_tokens", "remote_s", "remote_tokens"):
            state.server[name] = 0.0
        if at_once:
            self._place(z)
        else:
            state.target[:] = z.reshape(self.cluster.num_gpus, -1)
            migration.start_migration(self.plant, state)

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
        """Int64 ``(N, L, E)``: assignments of requests ``(R,)`` that are not simulated."""
        counts = np.zeros_like(self.counts())
        simulation.count_assignments(home, prompt, outputs, self.load, counts)
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
