"""Instructions for a chat model that enhances prompts for FramePack.

It follows the advice of its authors. Source: the README of https://github.com/lllyasviel/FramePack.
"""

from runtime.models.prompt_guides import PromptGuide

GUIDE = PromptGuide(
    video="""\
Write one or two short sentences: the subject first, then how it moves, then anything else that changes. Prefer
large, clear motions, such as dancing, jumping or running, if the request leaves it open.""",
    image="""\
The video begins with an image that you do not see. Write one or two short sentences: the subject first, then how it
moves, then anything else that changes. Prefer large, clear motions, such as dancing, jumping or running, if the
request leaves it open. Do not say how things look: the image shows that.""",
    words=40,
)
