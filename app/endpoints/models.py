"""`GET /v1/models` and `GET /v1/models/{id}`: the models that this web process can speak for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from falcon.asgi import Request, Response

from app.errors import model_not_found


class Models:
    """The list does not depend on live workers: a model without one is still served, after a wait."""

    def __init__(self, names: Iterable[str], created_s: int) -> None:
        self._models = {
            name: {"id": name, "object": "model", "created": created_s, "owned_by": "tokenferry"} for name in names
        }

    async def on_get(self, req: Request, resp: Response) -> None:
        resp.media = {"object": "list", "data": list(self._models.values())}

    async def on_get_one(self, req: Request, resp: Response, model: str) -> None:
        resp.media = self._one(model)

    on_head = on_get
    on_head_one = on_get_one

    def _one(self, model: str) -> dict[str, Any]:
        if model not in self._models:
            raise model_not_found(model, self._models)
        return self._models[model]
