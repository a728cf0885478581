"""A policy as the request router of Ray Serve: the replicas of a deployment are the experts.

::

    @serve.deployment(
        num_replicas=6,
        request_router_config=RequestRouterConfig(
            request_router_class="servegym.experiments.real.plugins.ray_serve:PolicyRequestRouter",
            request_router_kwargs={"fleet": {...}, "policy": "fleet_search"},
        ),
    )

A replica takes the lowest number that is free. A request counts from `choose_replicas` on, since
several are routed before the first of them is sent. What the policy drops raises Ray's
``BackPressureError`` with status 429 and ``Retry-After``. Predictions come with calls of a handle,
whose first argument is the body: Ray does not show its router the body of an HTTP request.

Nor does it show which replica is which, the tokens of an answer, and whether it was one. An
application that says all this is :mod:`~servegym.experiments.real.plugins.ray_app` (``told``).
"""

# Ray is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

try:
    from ray.serve.exceptions import BackPressureError
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed; pip install 'ray[serve]'", name=error.name
    ) from error

from servegym.experiments.real.gateway import GatewayRouter
from servegym.experiments.real.plugins.gate import Gate, Ticket, from_metadata

__all__ = ["EXPERT", "PolicyRequestRouter", "status", "ticket"]

EXPERT = "servegym_expert"
"""Key under which ``record_routing_stats`` of a replica gives its number among the experts."""

ROUTERS: WeakSet[PolicyRequestRouter] = WeakSet()
"""Of this process."""


class PolicyRequestRouter(RequestRouter):
    """Chooses replicas by a policy; see the module."""

    def initialize_state(
        self,
        fleet: Mapping[str, Any],
        policy: str = "fleet_search",
        *,
        budget_s: float | None = 0.01,
        trust_metadata: bool = False,
        told: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        """Ray passes ``request_router_kwargs`` here.

        Args:
            fleet: Arguments of ``servegym/LLMRouting-v1`` that describe the replicas.
            policy: Name of a policy, or a checkpoint.
            budget_s: Longest time of a decision, seconds; None: any.
            trust_metadata: Take predictions from ``metadata.servegym`` of requests.
            told: Replicas give their number as :data:`EXPERT`, and requests wait until one has; a
                call has a ``name``, and its caller tells the ticket of that name (`ticket`) how the
                request goes on and ends.
            names: Names of the experts, for `status`.
        """
        predict = from_metadata if trust_metadata else None
        router = GatewayRouter(fleet, policy, budget_s=budget_s)
        self.adopt(Gate(router, names=names, predict=predict), told=told)

    def adopt(self, gate: Gate, *, told: bool = False) -> None:
        """Route by a gate that is there."""
        self.gate, self._told = gate, told
        self._number: dict[ReplicaID, int] = {}
        self._tickets: dict[str, Ticket] = {}
        # Ray copies this class and the names that it uses; the module itself is there once.
        from servegym.experiments.real.plugins import ray_serve

        ray_serve.ROUTERS.add(self)

    def take(self, name: str) -> Ticket | None:
        """See the function `ticket`."""
        return self._tickets.pop(name, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See Ray: the replica that the policy chooses."""
        self._keep(candidate_replicas)
        known = {
            self._number[one.replica_id]: one
            for one in candidate_replicas
            if one.replica_id in self._number
        }
        if pending_request is None or not known:
            if pending_request is not None and self._told:
                pending_request.routing_context.should_backoff = True
                return []
            return [candidate_replicas]
        name = pending_request.metadata.internal_request_id
        if self._told:
            name = pending_request.kwargs["name"]
        self._left(name)  # if the replica was full, the policy is asked again
        # Without this Ray asks again at once, for ever, while the replica is full.
        pending_request.routing_context.should_backoff = True
        allowed = [k in known for k in range(len(self.gate.names))]
        ticket = self.gate.enter(_body(pending_request.args), allowed=allowed)
        if ticket.decision.dropped:
            refusal = BackPressureError(
                len(self._tickets), len(self._tickets), 429, self.gate.retry_after_s
            )
            if not pending_request.future.done():
                pending_request.future.set_exception(refusal)
            return [candidate_replicas]  # Ray sees that the request is done
        self._tickets[name] = ticket
        pending_request.future.add_done_callback(
            lambda future: self._left(name) if future.cancelled() else None
        )
        return [[known[ticket.expert]]]

    def _keep(self, running: Sequence[RunningReplica]) -> None:
        """Number the replicas that are new, and free the numbers of those that are gone."""
        if self._told:
            said = {one.replica_id: one.routing_stats.get(EXPERT, -1) for one in running}
            self._number = {k: v for k, v in said.items() if 0 <= v < len(self.gate.names)}
            return
        replicas = [one.replica_id for one in running]
        if self._number.keys() == set(replicas):
            return
        for gone in self._number.keys() - set(replicas):
            del self._number[gone]
        free = sorted(set(range(len(self.gate.names))) - set(self._number.values()))
        fresh = [one for one in replicas if one not in self._number]
        self._number.update(zip(fresh, free, strict=False))  # more than experts: not used

    def _left(self, name: str) -> None:
        ticket = self.take(name)
        if ticket is not None:
            ticket.left()

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See Ray: the request has ended, well or not."""
        ticket = None if self._told else self.take(internal_request_id)
        if ticket is not None:
            ticket.finished()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See Ray: what the replica had has failed."""
        super().on_replica_actor_died(replica_id)
        number = self._number.pop(replica_id, None)
        for name, ticket in list(self._tickets.items()):
            if ticket.expert == number:
                del self._tickets[name]
                ticket.failed()


def status() -> list[dict[str, Any]]:
    """What the routers of this process have done; see `Gate.status`."""
    return [one.gate.status() for one in ROUTERS]


def ticket(name: str) -> Ticket | None:
    """The ticket of a call that has been routed in this process, once; for applications that tell.

    Args:
        name: The call's ``name``.
    """
    found = (one.take(name) for one in ROUTERS)
    return next((one for one in found if one is not None), None)


def _body(args: Sequence[Any]) -> Mapping[str, Any]:
    """The body of a request that is called through a handle."""
    first: Any = args[0] if args else None
    if hasattr(first, "model_dump"):
        first = first.model_dump()
    return first if isinstance(first, Mapping) else {}
