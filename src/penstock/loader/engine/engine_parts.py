"""The objects that the parts of one engine share.

In:  the workers, the arena, and the rules and order that one loader follows.
Out: ``EngineParts``: all of these, and the estimates and the admission that are made from them.
Runs in: trainer, under the engine's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.arena.arena import Arena
from penstock.loader.engine.admission import Admission
from penstock.loader.engine.estimates import Pace
from penstock.loader.engine.worker_set import WorkerSet
from penstock.loader.rules import LoaderRules, Order


@dataclass(kw_only=True)
class EngineParts:
    workers: WorkerSet
    arena: Arena
    order: Order
    rules: LoaderRules
    pace: Pace = field(init=False)
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        order = self.order
        self.pace = Pace(
            self.rules,
            splits=order.splittable,
            in_place=order.rows,
            batch_rows=order.batch_rows,
            threads=order.threads,
        )
        self.admission = Admission(self.arena, self.rules, refetches=not self.order.bound)
