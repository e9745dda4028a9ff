"""A plan as text and back, every field of it: what the store and checkpoints keep."""

import json
import logging
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from runtime.core.plan import ExecutionPlan

logger = logging.getLogger(__name__)


def plan_to_json(plan: ExecutionPlan) -> str:
    """Return every field of a plan as text; `plan_from_json` gives back an equal plan."""
    return json.dumps(_plans().dump_python(plan, mode="json"))


def plan_from_json(text: str) -> ExecutionPlan | None:
    """Return the plan, or `None` if the text is not one of this version's."""
    try:
        return _plans().validate_python(json.loads(text))
    except (ValueError, ValidationError) as error:
        logger.warning("A stored plan cannot be read: %s", type(error).__name__)
        return None


@lru_cache(maxsize=1)
def _plans() -> TypeAdapter[ExecutionPlan]:
    return TypeAdapter(ExecutionPlan)
