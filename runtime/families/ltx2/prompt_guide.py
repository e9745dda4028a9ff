"""Instructions for a chat model that enhances prompts for LTX-2.

The rules are those of the authors' own prompts for this, in other words. Source: diffusers, pipelines/ltx2/utils.py,
Apache-2.0.
"""

from runtime.models.prompt_guides import PromptGuide

_SOUND = """\
Describe sounds together with what makes them, in the order in which they are heard: specific ones, such as soft
footsteps on tile. Only if the request has speech, give its exact words in quotation marks, with the voice and the
language. Use the present tense, and words such as "as", "then" and "while" for the order of events. Describe only
what can be seen and heard, in plain and restrained words. Camera motions, cuts and speech are those of the request:
invent none."""
GUIDE = PromptGuide(
    video=f"""\
Begin with the visual style, as in "Style: cinematic, "; without one in the request it is cinematic and realistic.
Then describe the scene in the order in which it happens. Give vague things concrete details: light, textures,
materials, and the clothes, hair and expressions of the people in the request. Add no further people.
{_SOUND}""",
    image=f"""\
The video begins with an image that you do not see. Describe what changes from it: motions, in the order in which
they happen. Do not say how things look: the image shows that.
{_SOUND}""",
    words=180,
)
