"""Shows the models in Anthropic's form, for clients that send the header `anthropic-version`.

Never finds a model: the routes do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

from fastapi import Depends, Query, Request

from graftwork.api.http.error_forms import wants_anthropic
from graftwork.platform.answers.models import Model, ModelInfo, ModelInfoPage

MAX_MODELS = 1000
_Id = Annotated[str | None, Query(max_length=200, pattern="^[ -~]*$")]


@dataclass(frozen=True, slots=True)
class ModelPageRequest:
    """The part of the list of models that a client of Anthropic's API asks for."""

    limit: int
    after_id: str | None
    before_id: str | None


async def _model_page_request(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_MODELS)] = MAX_MODELS,
    after_id: _Id = None,
    before_id: _Id = None,
) -> ModelPageRequest | None:
    return ModelPageRequest(limit, after_id, before_id) if wants_anthropic(request.scope) else None


AnthropicModelPage = Annotated[ModelPageRequest | None, Depends(_model_page_request)]
"""A parameter that selects a page of the models. It is None for a client of OpenAI's API, which gets all models."""


async def _asks_in_anthropics_form(request: Request) -> bool:
    return wants_anthropic(request.scope)


IsAnthropicClient = Annotated[bool, Depends(_asks_in_anthropics_form)]


def model_info(model: Model) -> ModelInfo:
    """Returns a model in Anthropic's form."""
    return ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
    )


def model_info_page(models: Sequence[Model], page: ModelPageRequest) -> ModelInfoPage:
    """Returns one page of the models: those after `after_id`, or the last ones before `before_id`.

    An unknown id has no effect.
    """
    ids = [model.id for model in models]
    start = ids.index(page.after_id) + 1 if page.after_id in ids else 0
    end = ids.index(page.before_id) if page.before_id in ids else len(ids)
    chosen = models[start:end]
    shown = chosen[-page.limit :] if page.before_id in ids else chosen[: page.limit]
    return ModelInfoPage(
        data=tuple(map(model_info, shown)),
        has_more=len(shown) < len(chosen),
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )
