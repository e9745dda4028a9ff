"""The web app: a page that asks for videos and watches the worker make them. The only place that imports gradio."""

import os

# Read by gradio when it is imported, which every module of this package does after this line.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
