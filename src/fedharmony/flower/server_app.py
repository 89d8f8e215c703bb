"""What the SuperLink runs: a run over sites, as ``fedharmony flower run`` ordered it.

The order says which settings, which folder, and how many sites; what became of it is written beside
the order, because Flower calls a run completed whose server merely ended.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import http_grid

from fedharmony.config import build
from fedharmony.errors import FedHarmonyError
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import server
from fedharmony.flower.link import SERVER, began
from fedharmony.flower.post import Post
from fedharmony.flower.roster import Terms
from fedharmony.flower.wire import PATIENCE, GridPost
from fedharmony.records import write_file

app = ServerApp()
logger = logging.getLogger(__name__)
# Flower's own function, but more impatient.
vars(http_grid)["pull_objects"] = partial(vars(http_grid)["pull_objects"], **PATIENCE)


@dataclass(frozen=True)
class Order:
    """What the server is to do.

    Attributes:
        config: file with all settings; empty to resume the run in the folder.
        out: the run's folder.
        outcome: the file that says how it ended.
        sites: how many sites to wait for.
        least: how many a round needs.
        registered: names of the sites that could be there, with commas between.
        wait_s: how long.
        limit_s: how long an exchange may take.
    """

    config: str
    out: str
    outcome: str
    sites: int
    least: int
    registered: str
    wait_s: float
    limit_s: float


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, and write down how it ended."""
    given = {key.replace("-", "_"): value for key, value in context.run_config.items()}
    order = build(Order, given, "order")
    outcome = {"status": "failed", "error": "the server ended without a word"}
    process = {"pid": os.getpid(), "began": began(os.getpid())}
    write_file(Path(order.outcome).with_name(SERVER), json.dumps(process).encode())
    try:
        carry_out(order, GridPost(grid))
        outcome = {"status": "completed", "error": ""}
    except FedHarmonyError as error:
        outcome["error"] = str(error)
        outcome["kind"] = type(error).__name__
        raise
    except BaseException as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_file(Path(order.outcome), json.dumps(outcome).encode())


def carry_out(order: Order, post: Post) -> None:
    """The run of an order."""
    logging.getLogger("fedharmony").setLevel(logging.INFO)
    registered = tuple(filter(None, order.registered.split(",")))
    terms = Terms(order.sites, order.least, order.wait_s, order.limit_s, registered)
    folder = RunFolder(Path(order.out))
    logger.info("Order: %s", asdict(order))
    if order.config:
        server.start(load_settings(order.config), folder, lambda event: None, post, terms)
    else:
        server.resume(folder, lambda event: None, post, terms)
