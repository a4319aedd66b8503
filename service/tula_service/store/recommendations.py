"""Caches rendered recommendations together with the versions of the data and the model that produced them."""

from __future__ import annotations

import sqlalchemy as sa

from tula_service.store._base import Repository
from tula_service.store.tables import answers


class AnswerCache(Repository):
    """The table of cached answers, which all workers and replicas share; clients receive the JSON `body` unchanged."""

    def get(
        self, job_id: str, name: str, *, data_version: int, model_version: str, or_newer: bool = False
    ) -> str | None:
        """Return the cached answer with this name and these versions (or with newer data if `or_newer`), else None."""
        version = answers.c.data_version
        conditions = (
            answers.c.job_id == job_id,
            answers.c.name == name,
            answers.c.model_version == model_version,
            version >= data_version if or_newer else version == data_version,
        )
        body: str | None = self._scalar(sa.select(answers.c.body).where(*conditions))
        return body

    def put(self, job_id: str, name: str, *, data_version: int, model_version: str, body: str) -> None:
        """Cache an answer, unless an answer computed from newer data is already cached."""
        values = {"data_version": data_version, "model_version": model_version, "body": body, "created_at": self._now()}
        older = answers.c.data_version <= data_version
        self._put(answers, {"job_id": job_id, "name": name}, values, where=older)
