"""Instructions for a chat model that enhances prompts for Wan models.

The rules are those of the authors' own prompt extension, in other words. Source: wan/utils/prompt_extend.py of
https://github.com/Wan-Video/Wan2.1, Apache-2.0.
"""

from runtime.models.prompt_guides import PromptGuide

GUIDE = PromptGuide(
    video="""\
Begin with the visual style: the one of the request, or the one that suits it best. Then describe, as far as they
can be seen: the main subject, with its number, age, clothing, expression and pose; what it does, in simple verbs of
natural motion; where things are in relation to each other; the surroundings, the light and the colors; and the
shot: its size, its angle, and how the camera moves.
Leave out sounds, and feelings that cannot be seen.""",
    image="""\
The video begins with an image that you do not see. Describe what moves and how, in simple verbs, in the order in
which it happens, and how the camera moves, if it does. Do not say how things look: the image shows that. Invent no
further people or things.""",
    words=100,
)
