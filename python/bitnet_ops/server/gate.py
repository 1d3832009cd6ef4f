"""Gate: how many answers are computed at once, how many requests may wait, and whose turn is next.

Clients take turns, so that one with a hundred requests does not make the others wait for all of
them; what nobody waits for comes last. For the event loop alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from bitnet_ops.errors import counted
from bitnet_ops.server.exchange import AskError


class Gate:
    """Admits requests.

    Args:
        running: answers that are computed at once.
        waiting: answers that may wait beside them.
        per_client: answers of one client, running and waiting; None: as many as there are.
    Attributes: `running` and `waiting`, how many there are now; `max_running`, `max_waiting`;
    `closed`, the reason why nobody is admitted any more.
    """

    def __init__(self, running: int, waiting: int, per_client: int | None = None) -> None:
        self.max_running, self.max_waiting = running, waiting
        self._per_client = running + waiting if per_client is None else per_client
        self.running = self.waiting = 0
        self.closed = ""
        # by whether somebody waits for the answer, and by client, whose turn it is first
        self._queues: tuple[OrderedDict[str, deque[Ticket]], ...] = (OrderedDict(), OrderedDict())
        self._clients: dict[str, int] = {}
        self._seconds = 2.0  # that a request has taken lately

    def enter(self, client: str, answers: int = 1, *, background: bool = False) -> Ticket:
        """A place for a request of so many answers; raises AskError, 429 or 503, without one."""
        if self.closed:
            raise AskError(f"server: {self.closed}", status=503, code="unavailable")
        held = self._clients.get(client, 0)
        if held + answers > self._per_client:
            raise AskError(
                f"server: expected at most {counted(self._per_client, 'answer')} at once for a "
                f"client, got {held + answers}; wait for one to end",
                status=429,
                code="rate_limit_exceeded",
            )
        ticket = Ticket(self, client, answers)
        if not self.waiting and self.running + answers <= self.max_running:
            self._begin(ticket)
        elif self.waiting + answers > self.max_waiting:
            raise AskError(
                f"server: expected at most {counted(self.max_waiting, 'answer')} to wait, got "
                f"{self.waiting + answers}; try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        else:
            self.waiting += answers
            self._queues[background].setdefault(client, deque()).append(ticket)
        self._clients[client] = held + answers
        return ticket

    @property
    def retry_after(self) -> int:
        """Seconds after which there is likely to be a place."""
        rounds = 1 + self.waiting / max(1, self.max_running)
        return max(1, min(60, round(self._seconds * rounds)))

    def _begin(self, ticket: Ticket) -> None:
        self.running += ticket.answers
        ticket.began = time.monotonic()
        ticket.admitted.set()

    def _leave(self, ticket: Ticket) -> None:
        left = self._clients[ticket.client] - ticket.answers
        if left:
            self._clients[ticket.client] = left
        else:
            del self._clients[ticket.client]
        if ticket.began is not None:
            self.running -= ticket.answers
            self._seconds += 0.2 * (time.monotonic() - ticket.began - self._seconds)
        else:
            self.waiting -= ticket.answers
            for queue in self._queues:
                tickets = queue.get(ticket.client)
                if tickets and ticket in tickets:
                    tickets.remove(ticket)
                    if not tickets:
                        del queue[ticket.client]
        self._admit()

    def _admit(self) -> None:
        for queue in self._queues:
            while queue:
                client, tickets = next(iter(queue.items()))
                if self.running + tickets[0].answers > self.max_running:
                    return
                ticket = tickets.popleft()
                if tickets:
                    queue.move_to_end(client)
                else:
                    del queue[client]
                self.waiting -= ticket.answers
                self._begin(ticket)


class Client:
    """Who asks, for the time of one request.

    What it holds is given back when the request is over, whichever way it ends: a place must not
    depend on whether an answer, or what sends it, has begun.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._held: list[Callable[[], None]] = []

    def hold(self, give_back: Callable[[], None]) -> None:
        self._held.append(give_back)

    def leave(self) -> None:
        while self._held:
            self._held.pop()()


class Ticket:
    """A place of one request; `admitted` is set when its turn has come. Left exactly once."""

    def __init__(self, gate: Gate, client: str, answers: int) -> None:
        self._gate, self.client, self.answers = gate, client, answers
        self.admitted = asyncio.Event()
        self.began: float | None = None
        self._left = False

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._gate._leave(self)
