"""The web app: a page for requests, the queue and the history. Only this package makes pages with gradio."""

from runtime.upstream.gradio import load

load()
