"""Published models that make no videos: of control frames, and of prompts. Imports no torch."""

from pathlib import Path
from typing import TypeAlias

from runtime.models import enhancers, preprocessors
from runtime.models.enhancers import PublishedEnhancer, folder_of_enhancer, published_enhancer
from runtime.models.preprocessors import PublishedPreprocessor, folder_of_preprocessor, published_preprocessor

PublishedHelper: TypeAlias = PublishedPreprocessor | PublishedEnhancer

PUBLISHED: tuple[PublishedHelper, ...] = (*preprocessors.PUBLISHED, *enhancers.PUBLISHED)


def published_helper(name: str) -> PublishedHelper | None:
    """Return the published model that makes no videos with a name, in any case."""
    return published_preprocessor(name) or published_enhancer(name)


def folder_of_helper(helper: PublishedHelper, weights_dir: Path) -> Path:
    """Return the folder of a model that makes no videos."""
    if isinstance(helper, PublishedEnhancer):
        return folder_of_enhancer(helper.name, weights_dir)
    return folder_of_preprocessor(helper.name, weights_dir)


def parent_of(name: str, weights_dir: Path) -> Path:
    """Return the folder in which a model's folder is: of those that make no videos, one in the weights folder."""
    helper = published_helper(name)
    return weights_dir if helper is None else folder_of_helper(helper, weights_dir).parent
