"""MLflow: an SQLite file under ``tracking/mlflow``, or the server that MLFLOW_TRACKING_URI names.

``mlflow ui --backend-store-uri sqlite:///RUN/tracking/mlflow/mlflow.db`` shows it.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedharmony.experiments.trackers.base import Pixels, Subject, Tracker, markdown, trackers

#: MLflow refuses longer values of parameters, and more of them in one call.
LONGEST, AT_ONCE = 500, 100
EXPERIMENT, TAG = "fedharmony", "fedharmony.folder"


@trackers.register("mlflow")
class MLflow(Tracker):
    """A run of MLflow."""

    packages = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, subject: Subject) -> None:
        """Find the record of the same folder, or make one."""
        place = (subject.place / "mlflow").resolve()
        place.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        with warnings.catch_warnings():  # of the packages that MLflow uses, to their authors
            warnings.simplefilter("ignore")
            client = import_module("mlflow").MlflowClient
            self._client: Any = client(tracking_uri=uri or f"sqlite:///{place / 'mlflow.db'}")
            experiment = self._client.get_experiment_by_name(EXPERIMENT)
            if experiment is None:
                files = None if uri else (place / "files").as_uri()
                number = self._client.create_experiment(EXPERIMENT, artifact_location=files)
            else:
                number = experiment.experiment_id
        folder = str(subject.folder.resolve())
        quoted = folder.replace("'", "")
        found = self._client.search_runs([number], f"tags.`{TAG}` = '{quoted}'", max_results=1)
        if subject.first and found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        run = self._client.create_run(number, run_name=subject.name, tags={TAG: quoted})
        self._run = run.info.run_id
        param = import_module("mlflow.entities").Param
        params = [param(key, str(value)[:LONGEST]) for key, value in subject.settings.items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + AT_ONCE])

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """One metric per number."""
        metric, now = import_module("mlflow.entities").Metric, int(1000 * time.time())
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + AT_ONCE])

    def table(self, rows: Sequence[Sequence[str]], metrics: Mapping[str, float]) -> None:
        """The table as a file, the final metrics as metrics of their own."""
        self._client.log_text(self._run, markdown(rows), "results.md")
        self.numbers(0, {f"final/{name}": value for name, value in metrics.items()})

    def pictures(self, pictures: Mapping[str, Pixels]) -> None:
        """Image files."""
        for name, pixels in pictures.items():
            self._client.log_image(self._run, pixels, artifact_file=f"{name}.png")

    def close(self, completed: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run, "FINISHED" if completed else "KILLED")
