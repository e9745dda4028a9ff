"""Cleaning of prompts before they are tokenized, as in diffusers' Wan pipeline."""

import html
import importlib.util
import re

_SPACES = re.compile(r"\s+")


def clean_prompt(text: str) -> str:
    """Return a prompt with broken characters, HTML entities and repeated white space replaced.

    Source: `prompt_clean` of diffusers' `pipelines.wan.pipeline_wan`, whose import loads every Wan pipeline.
    """
    if importlib.util.find_spec("ftfy") is not None:
        import ftfy

        text = ftfy.fix_text(text)
    text = html.unescape(html.unescape(text)).strip()
    return _SPACES.sub(" ", text).strip()
